"""The benchmarks' clock repeats the rounds that a machine's neighbours disturbed."""

import time

import pytest

from benchmarks.common import clock
from benchmarks.common.disturbance import PAUSE_SECONDS, Disturbance


@pytest.fixture
def disturbed(monkeypatch):
    """Set what the following looks at the machine find; then it is undisturbed."""
    findings = []
    monkeypatch.setattr(Disturbance, "_fastest", 1.0)  # known: nothing to search for
    monkeypatch.setattr(Disturbance, "_num_repeated", 0)
    monkeypatch.setattr(Disturbance, "_num_disturbed", 0)
    monkeypatch.setattr(Disturbance, "_left_of_all", 100.0)
    monkeypatch.setattr(Disturbance, "_is_now", lambda self: bool(findings) and findings.pop(0))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    return findings


def measure(rounds):
    calls = []
    clock.medians({"it": lambda: calls.append(1)}, rounds, round_seconds=0.0)
    return len(calls) - 1  # one call finds out how long a turn is


def test_undisturbed_rounds_are_measured_once(disturbed):
    assert measure(3) == 3
    assert Disturbance._num_repeated == 0


def test_disturbed_rounds_are_measured_again(disturbed):
    disturbed += [False, True]  # before the first round, after it
    assert measure(3) == 4
    assert Disturbance._num_repeated == 1


def test_a_round_waits_for_its_moment(disturbed):
    disturbed += [True, True, False, False]
    assert measure(3) == 3
    assert Disturbance._num_repeated == 0


def test_patience_ends(disturbed, monkeypatch):
    monkeypatch.setattr(clock, "PATIENCE", 2 * PAUSE_SECONDS)
    disturbed += [True] * 6  # two before the first round, then none is looked for before one
    assert measure(3) == 3
    assert Disturbance._num_disturbed == 3


def test_patience_of_all_comparisons_ends(disturbed, monkeypatch):
    monkeypatch.setattr(Disturbance, "_left_of_all", 2 * PAUSE_SECONDS)
    disturbed += [True] * 5  # two before the first round, one after each
    assert measure(3) == 3
    disturbed += [True] * 3
    assert measure(3) == 3
    assert Disturbance._num_disturbed == 6 and not disturbed


def test_time_of_the_processor_does_not_count_waiting():
    times = clock.medians({"it": lambda: time.sleep(0.02)}, 1, 0.0, of_processor=True)
    assert times["it"] < 0.01


def test_slow_calls_have_fewer_rounds(disturbed, monkeypatch):
    monkeypatch.setattr(clock, "ENOUGH_SECONDS", 0.0)
    assert measure(7) == clock.ENOUGH_ROUNDS
    assert measure(2) == 2


def test_a_single_round_looks_at_nothing(disturbed):
    disturbed += [True] * 6
    assert measure(1) == 1
    assert len(disturbed) == 6


def test_what_is_done_before_a_call_is_not_timed(monkeypatch):
    now = [0.0]
    done = []

    def before():
        done.append("before")
        now[0] += 10.0

    def call():
        done.append("call")
        now[0] += 1.0

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    assert clock.medians({"it": call}, 1, 3.0, {"it": before}) == {"it": 1.0}
    # Three find out that a turn is three calls, and one wakes the threads before the turn.
    assert done == ["before", "call"] * 7


def test_a_turn_begins_when_the_threads_of_the_last_one_sleep(monkeypatch):
    done = []
    monkeypatch.setattr("time.sleep", done.append)
    clock.medians({"one": lambda: done.append("one"), "two": lambda: done.append("two")}, 1, 0.0)
    assert done[-4:] == [clock.SETTLING, "one", clock.SETTLING, "two"]
