"""What is wrong in records."""

import numpy as np

from popsim_torch.observe.record import Record
from popsim_torch.observe.sinks import AlarmFinder, find_alarms
from popsim_torch.statistics import Statistics
from tests.unit.observe.made_records import record


def kinds(records):
    return [(alarm.name, alarm.kind, alarm.first_step) for alarm in find_alarms(records)]


def test_good_records_have_no_alarm():
    assert find_alarms(record("x", step, [1.0, -1.0, 0.0]) for step in range(9)) == []


def test_nan_and_infinities():
    values = [np.nan, np.inf, -np.inf, 1.0]
    found = find_alarms(record("x", step, values) for step in (3, 4, 6))
    assert [(one.kind, one.text) for one in found] == [
        ("nan", "1 of 4 values are NaN"),
        ("inf", "2 of 4 values are infinite"),
    ]
    assert [(one.first_step, one.last_step, one.times) for one in found] == [(3, 6, 3)] * 2


def test_only_zeros_with_and_without_counts():
    bare = Statistics(4, 0, 0, minimum=0.0, maximum=0.0)
    records = [record("x", 0, [0.0, -0.0]), Record("y", 1, None, 0, bare), record("z", 1, [])]
    assert kinds(records) == [("x", "zeros", 0), ("y", "zeros", 1)]


def test_a_norm_of_more_than_100_times_its_median():
    norms = [1.0, 2.0, 1.0, 150.0, 250.0, 1.0]
    (alarm,) = find_alarms(record("x", step, [norm]) for step, norm in enumerate(norms))
    assert (alarm.kind, alarm.first_step, alarm.times) == ("norm", 3, 2)
    assert alarm.text == "norm 150, 150 times its median"


def test_the_first_norms_cannot_explode_and_zeros_are_no_measure():
    assert kinds(record("x", step, [norm]) for step, norm in enumerate([1e-9, 1.0, 50.0])) == []
    zeros = [record("x", step, [0.0, 0.0]) for step in range(5)]
    assert kinds([*zeros, record("x", 5, [1.0])]) == [("x", "zeros", 0)]


def test_old_norms_are_forgotten():
    small = [record("x", step, [1.0]) for step in range(200)]
    large = [record("x", step, [500.0]) for step in range(200, 400)]
    (alarm,) = find_alarms([*small, *large])
    assert alarm.times < 60


def test_replicas_are_looked_at_apart_and_new_alarms_are_returned_once():
    finder = AlarmFinder()
    bad = [record("x", step, [np.nan], replica=1) for step in (0, 1)]
    assert [alarm.name for alarm in finder.look(bad[0])] == ["x (replica 1)"]
    assert finder.look(bad[1]) == [] and finder.alarms[0].times == 2
