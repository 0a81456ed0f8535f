"""Reading a queue while programs run: from other threads, waiting, and after failures."""

import asyncio
import itertools
import random
import threading
import time

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch.errors import Error, UsageTimeoutError
from popsim_torch.loops import function, repeat
from tests.unit.feeds.small_programs import SECONDS, Gate, Reader, counting, passing, queues

pytestmark = pytest.mark.timeout(120)


def values(elements):
    return [element.item() for element in elements]


class Paced:
    """A program that enqueues values when a test says so, and runs in a separate thread."""

    def __init__(self, iterations):
        self.gate = Gate()
        self.infeed, self.queue = queues(self.gate)
        self.program = passing(self.infeed, self.queue, iterations)
        self.running = Reader(self.program)
        assert self.queue.get(SECONDS) == 0

    def end(self, *elements):
        for element in elements:
            self.gate.put(element)
        self.gate.put(None)
        return self.running.value()


def test_elements_arrive_while_the_program_runs():
    paced = Paced(3)
    assert paced.queue.dequeue().tolist() == []
    assert paced.queue.poll() is None and list(paced.queue) == []
    paced.gate.put(1.0)
    assert paced.queue.dequeue(timeout=SECONDS).tolist() == [1]
    with pytest.raises(UsageTimeoutError, match="dequeue: the program still runs"):
        paced.queue.dequeue(wait_for_completion=True, timeout=0.01)
    with pytest.raises(UsageTimeoutError, match="drain: the program still runs"):
        paced.queue.drain(0.01)
    waiting = Reader(lambda: paced.queue.dequeue(wait_for_completion=True))
    paced.end(2.0)
    assert waiting.value().tolist() == [2]


def test_waiting_for_an_element_that_does_not_come():
    paced = Paced(2)
    assert paced.queue.dequeue(timeout=0.01).tolist() == []
    with pytest.raises(UsageTimeoutError):
        paced.queue.get(0.01)
    paced.end(1.0)
    assert paced.queue.dequeue().tolist() == [1]


def test_get_and_drain_wait_for_a_program_to_come():
    queue = poptorch.OutfeedQueue()
    reader = Reader(lambda: [queue.get(SECONDS).item() for _ in range(3)])
    counting(queue, 5)()
    assert reader.value() == [0, 1, 2] and queue.drain(0).tolist() == [3, 4]


def test_follow_waits_for_a_run_and_ends_with_it():
    queue = poptorch.OutfeedQueue()
    program = counting(queue, 50)
    for _ in range(3):
        reader = Reader(lambda: values(queue.follow(SECONDS)))
        program()
        assert reader.value() == list(range(50))


def test_follow_behind_a_run():
    queue = poptorch.OutfeedQueue()
    program = counting(queue, 3)
    program()
    assert values(queue.follow()) == [0, 1, 2]
    # The error of that run is not reported again.
    with pytest.raises(UsageTimeoutError):
        next(queue.follow(0.01))
    program()
    queue.dequeue()
    with pytest.raises(UsageTimeoutError):
        next(queue.follow(0.01))


def test_follow_of_a_run_that_enqueues_nothing():
    queue = poptorch.OutfeedQueue()
    queue._begin_run()
    queue._end_run(None)
    assert list(queue.follow()) == []


def test_follow_until_close_goes_on_to_further_runs():
    queue = poptorch.OutfeedQueue()
    program = counting(queue, 3)
    reader = Reader(lambda: values(queue.follow(SECONDS, until="close")))
    program()
    program()
    queue.close()
    assert reader.value() == [0, 1, 2, 0, 1, 2]


def test_a_broken_off_follower_loses_nothing():
    queue = poptorch.OutfeedQueue()
    counting(queue, 5)()
    for element in queue.follow():
        if element == 2:
            break
    assert values(queue.follow()) == [3, 4]


def test_async_iteration_lets_other_tasks_run():
    paced = Paced(4)
    told = []

    async def follow():
        async for element in paced.queue:
            told.append(element.item())

    async def tell():
        for number in (1.0, 2.0, 3.0):
            paced.gate.put(number)
            while len(told) < number:
                await asyncio.sleep(0.001)
        paced.gate.put(None)

    async def both():
        await asyncio.wait_for(asyncio.gather(follow(), tell()), SECONDS)

    asyncio.run(both())
    assert told == [1, 2, 3] and paced.running.value() is None


def failing(*elements):
    def dataset():
        yield from elements
        raise ValueError("spoilt")

    infeed, queue = queues(dataset)
    return queue, passing(infeed, queue, 100)


def test_an_error_comes_behind_the_last_element():
    queue, program = failing(1.0, 2.0)
    reader = Reader(lambda: [queue.get(SECONDS) for _ in range(3)])
    with pytest.raises(Error, match="spoilt") as caught:
        program()
    with pytest.raises(Error, match="spoilt") as told:
        reader.value()
    assert told.value is caught.value
    # The error stays until the next run.
    for read in (lambda: queue.get(), lambda: queue.dequeue(timeout=1)):
        with pytest.raises(Error, match="spoilt"):
            read()
    assert queue.dequeue().tolist() == []


@pytest.mark.parametrize("until", ["run", "close"])
def test_followers_hear_of_an_error(until):
    queue, program = failing(1.0, 2.0)
    found = []

    def follow():
        for element in queue.follow(SECONDS, until):
            found.append(element.item())

    reader = Reader(follow)
    with pytest.raises(Error, match="spoilt"):
        program()
    with pytest.raises(Error, match="spoilt"):
        reader.value()
    assert found == [1, 2]


def test_async_followers_hear_of_an_error():
    queue, program = failing(1.0)
    with pytest.raises(Error, match="spoilt"):
        program()

    async def follow():
        return [element.item() async for element in queue]

    with pytest.raises(Error, match="spoilt"):
        asyncio.run(follow())


def test_a_program_that_cannot_be_compiled_ends_followers():
    queue = poptorch.OutfeedQueue()

    def spoilt(count):
        raise ZeroDivisionError("in the body")

    reader = Reader(lambda: values(queue.follow(SECONDS)))
    with pytest.raises(ZeroDivisionError):
        counting(queue, 3, spoilt)()
    with pytest.raises(ZeroDivisionError):
        reader.value()
    counting(queue, 2)()
    assert values(queue.follow()) == [0, 1]


def test_closing_ends_those_who_wait():
    queue = poptorch.OutfeedQueue()
    readers = [Reader(lambda: queue.get(SECONDS)), Reader(lambda: values(queue.follow(SECONDS)))]
    time.sleep(0.02)
    queue.close()
    with pytest.raises(Error, match="closed, and everything is read"):
        readers[0].value()
    assert readers[1].value() == []


def test_two_programs_at_once():
    queue = poptorch.OutfeedQueue()
    running = [Reader(counting(queue, 500, lambda count, k=k: count + 1000 * k)) for k in range(2)]
    for one in running:
        one.value()
    found = queue.dequeue().tolist()
    for k in range(2):
        mine = [value for value in found if value // 1000 == k]
        assert mine == list(range(1000 * k, 1000 * k + 500))


def pause(rng):
    if rng.random() < 0.1:
        time.sleep(rng.random() * 0.002)


@pytest.mark.parametrize("seed", range(3))
def test_many_readers_share_the_elements(seed):
    queue = poptorch.OutfeedQueue(buffer_depth=1 + seed, max_bytes=None if seed else 400)
    iterations = 3000
    over = threading.Event()

    def read(kind):
        rng, found = random.Random(f"{seed} {kind}"), []
        while not over.is_set():
            pause(rng)
            if kind % 3 == 0:
                taken = queue.dequeue()
                found += [] if isinstance(taken, list) else taken.flatten().tolist()
            elif kind % 3 == 1:
                found += values(queue)
            else:
                element = queue.poll()
                found += [] if element is None else [element.item()]
        return found

    readers = [Reader(lambda kind=kind: read(kind)) for kind in range(6)]
    counting(queue, iterations)()
    rest = queue.dequeue().tolist()
    over.set()
    shares = [*(reader.value() for reader in readers), rest]
    assert all(share == sorted(share) for share in shares)
    assert sorted(itertools.chain(*shares)) == list(range(iterations))
    assert queue.statistics()["dequeued"] == iterations


def test_followers_share_the_elements():
    queue = poptorch.OutfeedQueue(max_bytes=40)
    readers = [Reader(lambda: values(queue.follow(until="close"))) for _ in range(4)]
    counting(queue, 2000)()
    counting(queue, 2000)()
    queue.close()
    assert sorted(itertools.chain(*(reader.value() for reader in readers))) == sorted(
        [*range(2000)] * 2
    )


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize(
    "iterations",
    [100_000, pytest.param(10_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_two_queues_with_many_small_elements(iterations):
    queues = [poptorch.OutfeedQueue(max_bytes=1 << 20) for _ in range(2)]

    @function
    def program():
        def body(count):
            queues[0].enqueue(count)
            queues[1].enqueue({"twice": 2 * count, "pair": torch.stack([count, -count])})
            return count + 1

        return repeat(iterations, body, inputs=0)

    def read(queue, counts_in):
        done = most = 0
        while done < iterations:
            taken = queue.dequeue(timeout=1.0)
            if not isinstance(taken, list):
                counts = counts_in(taken)
                assert torch.equal(counts, torch.arange(done, done + len(counts)).int())
                done += len(counts)
                most = max(most, resident_bytes())
            time.sleep(0.002)
        return most

    def of_pairs(taken):
        assert torch.equal(taken["pair"], torch.stack([taken["twice"], -taken["twice"]], 1) // 2)
        return taken["twice"] // 2

    before = resident_bytes()
    readers = [
        Reader(lambda: read(queues[0], lambda taken: taken)),
        Reader(lambda: read(queues[1], of_pairs)),
    ]
    assert program() == iterations
    for reader in readers:
        assert reader.value() - before < 150 << 20
    for queue in queues:
        found = queue.statistics()
        assert found["enqueued"] == found["dequeued"] == iterations
        assert found["peak_bytes"] <= 1 << 20


def test_all_the_time_in_the_world():
    queue = poptorch.OutfeedQueue()
    counting(queue, 2)()
    assert queue.get(float("inf")) == 0 and queue.drain(float("inf")).tolist() == [1]
    assert queue.dequeue(wait_for_completion=True).shape == (0,)
