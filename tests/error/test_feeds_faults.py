"""Faults around running loops: of the data, of readers, of full queues.

After each fault, the elements enqueued before it can be read in order; the message says what and
where; followers end, with the program's error after the last element; the function and the queues
are still usable.
"""

import asyncio
import gc
import re
import threading
import time

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch.errors import UsageTimeoutError
from tests.error.running_loops import (
    Follower,
    Gate,
    Job,
    counting,
    no_thread_stays,  # noqa: F401
    numbers,
    passing,
    until,
)

pytestmark = [
    pytest.mark.timeout(60, method="thread"),
    pytest.mark.usefixtures("no_thread_stays"),
]


class Disk:
    """A dataset that fails at the element with this number until the test repairs it."""

    def __init__(self, count, broken, element=lambda i: torch.tensor(float(i))):
        self.count, self.broken, self.element = count, broken, element

    def __call__(self):
        for i in range(self.count):
            if i == self.broken:
                raise OSError("the disk is gone")
            yield self.element(i)


# The data


def test_the_dataset_fails():
    disk = Disk(20, broken=7)
    infeed, outfeed = poptorch.InfeedQueue(disk), poptorch.OutfeedQueue()
    program, follower = passing(infeed, outfeed, 20), Follower(outfeed)
    with pytest.raises(poptorch.Error, match=r"failed at element 7 .*the disk is gone") as caught:
        program()
    assert "(iteration 7 of the loop, counted from 0, did not begin)" in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert follower.wait() is caught.value
    assert follower.elements == numbers(7)
    disk.broken = None
    infeed.reset()
    program()
    assert outfeed.dequeue().tolist() == numbers(20)
    infeed.close()


def test_an_element_of_the_wrong_shape():
    data = [torch.full((3,), float(i)) for i in range(90)]
    good, data[77] = data[77], torch.zeros(2)
    infeed, outfeed = poptorch.InfeedQueue(data), poptorch.OutfeedQueue()
    program, follower = passing(infeed, outfeed, 90), Follower(outfeed)
    text = r"element 77 is \(float32\[2\]\), and the first one was \(float32\[3\]\).*drop_last=True"
    with pytest.raises(poptorch.Error, match=text) as caught:
        program()
    assert follower.wait() is caught.value
    assert [element[0] for element in follower.elements] == numbers(77)
    data[77] = good
    infeed.reset()
    program()
    assert outfeed.dequeue()[:, 0].tolist() == numbers(90)
    infeed.close()


def test_the_data_ends():
    infeed, outfeed = poptorch.InfeedQueue(torch.arange(5.0)), poptorch.OutfeedQueue()
    program = passing(infeed, outfeed, 8)
    for _ in range(2):
        follower = Follower(outfeed)
        text = r"the end of the dataset was reached.*element 5.*\(iteration 5 of the.*not begin"
        with pytest.raises(poptorch.Error, match=text):
            program()
        assert re.search(text, str(follower.wait()))
        assert follower.elements == numbers(5)
        infeed.reset()
    infeed.close()


def test_the_dataset_stalls():
    gate = Gate()
    infeed, outfeed = poptorch.InfeedQueue(gate), poptorch.OutfeedQueue()
    program = passing(infeed, outfeed, 6)
    run, follower = Job(program), Follower(outfeed)
    gate.let(2)
    until(lambda: len(follower.elements) == 3)
    with pytest.raises(UsageTimeoutError, match=r"no element for 0.05 seconds"):
        next(outfeed.follow(timeout=0.05))
    with pytest.raises(UsageTimeoutError, match=r"still runs after 0.05 seconds"):
        outfeed.drain(timeout=0.05)
    assert program.stop()
    assert "run: stopped after 3 of 6 device iterations" in str(run.wait())
    assert follower.wait() is None
    # The next run continues with the next element.
    gate.let(6)
    program()
    assert follower.elements + outfeed.dequeue().tolist() == numbers(9)
    infeed.close()
    gate.end()


def test_closing_what_a_program_waits_for():
    gate = Gate()
    infeed, outfeed = poptorch.InfeedQueue(gate), poptorch.OutfeedQueue()
    program = passing(infeed, outfeed, 6)
    run, follower = Job(program), Follower(outfeed)
    until(lambda: follower.elements)
    infeed.close()
    assert "the infeed queue is closed" in str(run.wait())
    assert follower.wait() is run.error and follower.elements == [0.0]
    with pytest.raises(poptorch.Error, match=r"the queue is closed. Make another one"):
        program()
    gate.end()


def test_a_dataset_that_cannot_begin():
    def broken():
        raise OSError("no disk at all")
        yield

    infeed, outfeed = poptorch.InfeedQueue(broken), poptorch.OutfeedQueue()
    program, follower = passing(infeed, outfeed, 3), Follower(outfeed)
    with pytest.raises(poptorch.Error, match=r"failed at element 0 .*no disk at all") as caught:
        program()
    assert follower.wait() is caught.value and follower.elements == []


# Readers


def test_a_reader_leaves_early():
    outfeed = poptorch.OutfeedQueue()
    program = counting(outfeed, 100)
    run = Job(program)
    seen = [element.item() for element, _ in zip(outfeed.follow(), range(4), strict=False)]
    run.value()
    # (zip has taken one more element than it returned)
    assert seen + outfeed.dequeue().tolist() == [*range(4), *range(5, 100)]


def test_nobody_reads_a_full_queue_for_a_while():
    outfeed = poptorch.OutfeedQueue(max_bytes=40)
    run = Job(counting(outfeed, 1000))
    until(lambda: outfeed.statistics()["enqueued"] == 10)
    time.sleep(0.3)
    assert run.is_alive() and outfeed.statistics()["enqueued"] == 10
    follower = Follower(outfeed)
    run.value()
    assert follower.wait() is None and follower.elements == list(range(1000))
    statistics = outfeed.statistics()
    assert statistics["peak_bytes"] == 40 and statistics["seconds_waited"] >= 0.2


def test_a_full_queue_that_raises():
    outfeed = poptorch.OutfeedQueue(max_bytes=40, when_full="raise")
    program = counting(outfeed, 30)
    text = r"queue is full: it holds 10 elements of 4 bytes.*max_bytes is 40.*\(in iteration 10 of"
    for _ in range(2):
        with pytest.raises(poptorch.Error, match=text):
            program()
        with pytest.raises(poptorch.Error, match=text):
            for _ in range(11):
                outfeed.get()
        assert outfeed.statistics()["bytes"] == 0
    assert outfeed.statistics()["enqueued"] == 20


def test_stopping_a_program_at_a_full_queue():
    outfeed = poptorch.OutfeedQueue(max_bytes=40)
    program = counting(outfeed, 1000)
    run = Job(program)
    until(lambda: outfeed.statistics()["enqueued"] == 10)
    assert program.stop()
    assert "run: stopped" in str(run.wait())
    seen = outfeed.dequeue().tolist()
    assert seen == list(range(len(seen))) and len(seen) in (10, 11)
    run, follower = Job(program), Follower(outfeed)
    assert run.value() == 1000
    assert follower.wait() is None and follower.elements == list(range(1000))


def test_closing_a_full_queue():
    outfeed = poptorch.OutfeedQueue(max_bytes=40)
    program = counting(outfeed, 1000)
    run = Job(program)
    until(lambda: outfeed.statistics()["enqueued"] == 10)
    outfeed.close()
    assert re.search(r"the outfeed queue is closed.*in iteration 10", str(run.wait()))
    assert outfeed.dequeue().tolist() == list(range(10))
    with pytest.raises(poptorch.Error, match="the queue is closed"):
        program()


def test_async_readers_hear_of_faults_behind_the_last_element():
    infeed, outfeed = poptorch.InfeedQueue(Disk(9, broken=4)), poptorch.OutfeedQueue()
    run, seen = Job(passing(infeed, outfeed, 9)), []

    async def read():
        async for element in outfeed:
            seen.append(element.item())

    with pytest.raises(poptorch.Error, match="the disk is gone"):
        asyncio.run(read())
    assert seen == numbers(4) and "the disk is gone" in str(run.wait())
    infeed.close()


# Memory


def test_no_memory_is_kept(request):
    """Run rounds of faults, each with 16 MB in flight."""
    element = torch.zeros(1 << 20)

    def one_round():
        disk = Disk(6, broken=4, element=lambda i: element)
        infeed, outfeed = poptorch.InfeedQueue(disk), poptorch.OutfeedQueue()
        program = passing(infeed, outfeed, 6)
        with pytest.raises(poptorch.Error, match="the disk is gone"):
            program()
        assert len(outfeed.dequeue()) == 4
        infeed.close()

    def rounds(count):
        for _ in range(count):
            one_round()
            gc.collect()  # (errors and the frames that they keep form a cycle)

    gc.collect()
    gc.freeze()  # the collector then skips the objects that exist already
    request.addfinalizer(gc.unfreeze)
    rounds(6)
    before = resident_bytes()
    rounds(14)
    assert resident_bytes() - before < 100e6
    assert threading.active_count() < 20


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
