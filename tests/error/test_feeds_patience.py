"""A full queue without a reader ends its program, and the message says what to do."""

import math
import pickle
import re
import time

import pytest

import popsim_torch as poptorch
from tests.error.running_loops import Follower, Job, counting, no_thread_stays, until  # noqa: F401

pytestmark = [
    pytest.mark.timeout(60, method="thread"),
    pytest.mark.usefixtures("no_thread_stays"),
]

FULL = (
    r"outfeed queue is full, and nobody has read it for 0\.2 seconds \(patience\): it holds 10 "
    r"elements of 4 bytes that nobody has read, max_bytes is 40, and there is no place for element "
    r"10 \(counted from 0\) of int32\[\] enqueued at .*running_loops\.py:\d+.*queue\.follow\(\).*"
    r"max_bytes.*when_full='drop_oldest'.*\(in iteration 10 of the loop"
)


def test_nobody_reads():
    outfeed = poptorch.OutfeedQueue(max_bytes=40, patience=0.2)
    program = counting(outfeed, 1000)
    began = time.monotonic()
    with pytest.raises(poptorch.Error, match=re.compile(FULL, re.DOTALL)):
        program()
    assert 0.2 <= time.monotonic() - began < 30
    assert outfeed.statistics()["seconds_waited"] >= 0.2
    # The enqueued elements can be read, and the error comes after them; then everything is usable
    # again.
    seen = []
    with pytest.raises(poptorch.Error, match="patience"):
        for _ in range(11):
            seen.append(outfeed.get().item())
    assert seen == list(range(10))
    run, follower = Job(program), Follower(outfeed)
    assert run.value() == 1000
    assert follower.wait() is None and follower.elements == list(range(1000))


def test_a_slow_reader_is_waited_for():
    outfeed = poptorch.OutfeedQueue(max_bytes=4, patience=0.5)
    run = Job(counting(outfeed, 8))
    for number in range(8):
        time.sleep(0.1)  # together more than the patience
        assert outfeed.get().item() == number
    assert run.value() == 8


def test_patience_without_end():
    outfeed = poptorch.OutfeedQueue(max_bytes=4, patience=None)
    run = Job(counting(outfeed, 2))
    until(lambda: outfeed.statistics()["enqueued"] == 1)
    time.sleep(0.2)
    assert run.is_alive()
    assert [outfeed.get().item(), outfeed.get().item()] == [0, 1]
    run.value()


def test_the_copy_in_another_process_is_as_patient():
    for patience in (None, 5.0):
        copy = pickle.loads(pickle.dumps(poptorch.OutfeedQueue(patience=patience)))
        assert copy._patience == patience


@pytest.mark.parametrize("patience", [0, -1.0, math.nan, math.inf, True, "long"])
def test_what_is_no_patience(patience):
    with pytest.raises(poptorch.Error, match="patience must be a number of seconds above 0, got"):
        poptorch.OutfeedQueue(max_bytes=40, patience=patience)
