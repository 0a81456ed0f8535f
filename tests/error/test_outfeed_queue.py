"""Mistakes with queues out of a program."""

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch.errors import Error, UsageTimeoutError
from popsim_torch.loops import function, repeat

LAST = poptorch.OutfeedMode.LAST


def enqueue(queue, *elements):
    @function
    def program():
        def body():
            for element in elements:
                queue.enqueue(element)

        repeat(2, body)

    program()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"mode": "ALL"}, "mode must be a poptorch.OutfeedMode, got 'ALL'"),
        ({"mode": 0}, "mode must be a poptorch.OutfeedMode, got 0"),
        ({"buffer_depth": 0}, "buffer_depth must be an integer of 1 or more, got 0"),
        ({"buffer_depth": 1.5}, "buffer_depth must be an integer of 1 or more, got 1.5"),
        ({"max_bytes": -1}, "max_bytes must be an integer of 0 or more, got -1"),
        (
            {"when_full": "drop"},
            "when_full must be one of 'wait', 'raise', 'drop_oldest'",
        ),
        ({"every": 0}, "every must be an integer of 1 or more, got 0"),
        ({"device_ordinal": -2}, "device_ordinal must be an integer of 0 or more, got -2"),
        ({"optimise_latency": None}, "optimise_latency must be True or False, got None"),
        ({"replication_factor": 0}, "replication_factor must be an integer of 1 or more, got 0"),
    ],
    ids=str,
)
def test_settings(settings, text):
    with pytest.raises(Error) as caught:
        poptorch.OutfeedQueue(**settings)
    assert text in str(caught.value)


def test_hints_are_accepted():
    queue = poptorch.OutfeedQueue(device_ordinal=1, optimise_latency=True, replication_factor=1)
    enqueue(queue, 1.0)
    assert queue.dequeue().tolist() == [1, 1]


def test_outside_of_a_program():
    with pytest.raises(Error, match="no program is being traced here"):
        poptorch.OutfeedQueue().enqueue(torch.ones(1))


def test_twice_in_a_program():
    with pytest.raises(Error, match="only once") as caught:
        enqueue(poptorch.OutfeedQueue(), 1.0, 2.0)
    assert str(caught.value).count(__file__) == 2


@pytest.mark.parametrize(
    ("element", "text"),
    [
        ((), "the element is (), which has no tensor in it"),
        (None, "the element is a NoneType"),
        ({"x": "text"}, "the element['x'] is a str"),
        ([torch.ones(1), 1j], "the element[1] is a complex"),
    ],
    ids=str,
)
def test_no_element(element, text):
    with pytest.raises(Error) as caught:
        enqueue(poptorch.OutfeedQueue(), element)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "other",
    [torch.ones(3), torch.ones(2, dtype=torch.float16), (torch.ones(2),), {"x": torch.ones(2)}],
    ids=str,
)
def test_programs_that_differ(other):
    queue = poptorch.OutfeedQueue()
    enqueue(queue, torch.ones(2))
    with pytest.raises(Error, match="All elements of a queue are alike") as caught:
        enqueue(queue, other)
    assert "(float32[2])" in str(caught.value) and str(caught.value).count(__file__) == 2
    enqueue(queue, torch.ones(2))
    assert queue.dequeue().shape == (4, 2)


@pytest.mark.parametrize("read", [iter, aiter, lambda queue: queue.follow()])
def test_one_at_a_time_of_the_newest(read):
    with pytest.raises(Error, match="needs a queue that keeps all elements"):
        read(poptorch.OutfeedQueue(LAST))


@pytest.mark.parametrize("timeout", [-1, "3", True, float("nan")])
def test_timeouts(timeout):
    queue = poptorch.OutfeedQueue()
    for read in (queue.get, queue.drain, queue.follow):
        with pytest.raises(Error, match="timeout must be seconds, 0 or more, or None"):
            read(timeout)


def test_follow_until_something_else():
    with pytest.raises(Error, match="until must be 'run' or 'close', got 'end'"):
        poptorch.OutfeedQueue().follow(until="end")


def test_time_is_up():
    queue = poptorch.OutfeedQueue()
    with pytest.raises(UsageTimeoutError, match=r"no element for 0\.01 seconds"):
        queue.get(0.01)
    with pytest.raises(TimeoutError, match=r"no element for 0\.01 seconds"):
        next(queue.follow(0.01))
    with pytest.raises(Error, match=r"no element for 0 seconds"):
        queue.get(0)
