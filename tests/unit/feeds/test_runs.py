"""The information that readers get about runs."""

import pytest

from popsim_torch.errors import Error
from popsim_torch.feeds.runs import Running, Runs


def test_nested_runs_are_one():
    runs = Runs()
    assert not runs.has_ended
    runs.begin()
    runs.begin()
    assert (runs.num_active, runs.num_begun, runs.has_ended) == (2, 1, False)
    runs.end(None)
    assert not runs.has_ended
    runs.end(None)
    assert runs.has_ended
    runs.mark_followed()
    assert not runs.has_ended


def test_a_run_that_goes_on_is_not_followed_to_its_end():
    runs = Runs()
    runs.begin()
    runs.mark_followed()
    runs.end(None)
    assert runs.has_ended


def test_the_first_failure_stays_until_the_next_run():
    runs = Runs()
    runs.begin()
    runs.begin()
    first = ValueError("first")
    runs.end(first)
    runs.end(RuntimeError("second"))
    assert runs.failure is first
    runs.begin()
    assert runs.failure is None


@pytest.mark.parametrize(
    "error",
    [None, KeyboardInterrupt(), SystemExit(), Error("run: stopped after 3 of 5 device iterations")],
    ids=repr,
)
def test_who_ends_a_run_does_not_make_it_fail(error):
    runs = Runs()
    runs.begin()
    runs.end(error)
    assert runs.failure is None


class Told:
    def __init__(self, log, refuses=False):
        self.log, self.refuses = log, refuses

    def _begin_run(self):
        if self.refuses:
            raise Error("not now")
        self.log.append((self, "begins"))

    def _end_run(self, error):
        self.log.append((self, error))


def test_queues_are_told_of_a_scope_as_often_as_it_is_entered():
    log = []
    first, second = Told(log), Told(log)
    scope, failure = Running([first, second]), ValueError("failed")
    for _ in range(2):
        log.clear()
        with scope:
            assert log == [(first, "begins"), (second, "begins")]
        assert log[2:] == [(second, None), (first, None)]
    with pytest.raises(ValueError, match="failed"), scope:
        raise failure
    assert log[-2:] == [(second, failure), (first, failure)]


def test_a_queue_that_refuses_a_run():
    log = []
    first, last = Told(log), Told(log)
    refusing = Told(log, refuses=True)
    with pytest.raises(Error, match="not now") as caught, Running([first, refusing, last]):
        raise AssertionError("never here")
    assert log == [(first, "begins"), (first, caught.value)]
