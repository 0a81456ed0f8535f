"""Random faults at random times, in many rounds: no hang, no lost element, everything usable.

A round runs a program with an infeed, an outfeed and readers, while other threads stop the program,
close queues, let the dataset fail or stall, or read slowly. If a round fails, the message contains
its seed: ``one_round(seed)`` runs the round again.
"""

import contextlib
import gc
import random
import threading
import time

import pytest
import torch

import popsim_torch as poptorch
from tests.error.running_loops import Job, own_threads, until

pytestmark = pytest.mark.timeout(120, method="thread")

EXPECTED = (
    "the dataset failed at element",
    "the end of the dataset was reached",
    "run: stopped",
    "the infeed queue is closed",
    "the queue is closed",
    "the outfeed queue is closed",
    "the outfeed queue is full",
    "and the first one was",
)


class Data:
    """A dataset of 0, 1, 2, ... with random pauses, an end, and perhaps a fault before it."""

    def __init__(self, chance, iterations):
        self._chance = random.Random(chance.random())
        self._count = chance.choice([iterations, iterations, iterations // 2, iterations * 3])
        self._fault = chance.choice([None, None, "raise", "shape"])
        self._at = chance.randrange(1, iterations)
        self._pace = chance.choice([0, 0, 0.0005])

    def __call__(self):
        for number in range(self._count):
            if self._pace:
                time.sleep(self._chance.uniform(0, 2 * self._pace))
            if number == self._at and self._fault == "raise":
                raise OSError("by chance")
            if number == self._at and self._fault == "shape":
                yield torch.zeros(3)
            yield torch.tensor([number, -number])


class Round:
    """One round: the queues, the program and all threads that use them."""

    def __init__(self, seed):
        self.chance = chance = random.Random(seed)
        self.iterations = chance.randrange(2, 60) * 4
        self.infeed = poptorch.InfeedQueue(Data(chance, self.iterations), chance.randrange(1, 5))
        full = chance.choice(["wait"] * 5 + ["raise", "drop_oldest", "drop_newest", "spill"])
        bounds = [0, 64, 1000] if full in ("drop_oldest", "drop_newest", "spill") else [None, 0, 64]
        self.outfeed = poptorch.OutfeedQueue(max_bytes=chance.choice(bounds), when_full=full)
        self.drops_oldest = full == "drop_oldest"
        self.elements = []
        pipelined = chance.random() < 0.3

        @poptorch.function
        def program():
            def body(count, x):
                if pipelined:
                    poptorch.Block.start(ipu_id=0)
                y = x * 1
                if pipelined:
                    poptorch.Block.start(ipu_id=1)
                self.outfeed.enqueue(y - 1 + count * 0)
                return count + 1

            return poptorch.repeat(self.iterations, body, 0, infeed=self.infeed)

        self.program = program

    def pause(self):
        time.sleep(self.chance.choice([0, self.chance.uniform(0, 0.005)]))

    def disturb(self):
        """Make one disturbance at a random time, mostly while the loop runs."""
        if self.chance.random() < 0.7:
            before = self.outfeed.statistics()["enqueued"]
            until(lambda: self.outfeed.statistics()["enqueued"] != before or self.over.is_set())
        self.pause()
        what = self.chance.choice(
            [self.program.stop] * 3
            + [self.infeed.close, self.outfeed.close, gc.collect, lambda: None, lambda: None]
        )
        what()

    def read(self):
        """Read until the run ends, in one of several ways."""
        slow = self.chance.random() < 0.3
        how = self.chance.choice(["follow", "get", "dequeue", "leave"])
        leaves_behind = self.chance.randrange(1, 20)
        over = self.over
        with contextlib.suppress(poptorch.Error):
            if how in ("follow", "leave"):
                for element in self.outfeed.follow():
                    self.elements.append(element.tolist())
                    if slow:
                        time.sleep(0.0002)
                    if how == "leave" and len(self.elements) == leaves_behind:
                        break
            elif how == "get":
                while not over.is_set():
                    with contextlib.suppress(TimeoutError):
                        self.elements.append(self.outfeed.get(timeout=0.002).tolist())
        # (a follower may have seen the end of an earlier run)
        while not over.is_set():
            found = self.outfeed.dequeue()
            self.elements += found.tolist() if isinstance(found, torch.Tensor) else found
            time.sleep(0.001)

    def run(self):
        """Run the program up to three times, with faults; check everything."""
        for number in range(self.chance.randrange(1, 4)):
            self.run_once(number)
        with contextlib.suppress(poptorch.Error):
            self.elements += self.outfeed.dequeue().tolist()
        self.check_order()
        assert self.outfeed.statistics()["bytes"] == 0
        self.infeed.close()
        self.program.destroy()

    def run_once(self, number):
        before = self.infeed.statistics()["taken"]
        self.over = threading.Event()
        error = None
        disturbers = [Job(self.disturb) for _ in range(self.chance.randrange(3))]
        reader = Job(self.read)
        self.pause()
        try:
            assert int(self.program()) == self.iterations
        except poptorch.Error as raised:
            error = raised
        self.over.set()
        for job in (*disturbers, reader):
            job.value()
        if error is None:
            assert self.infeed.statistics()["taken"] - before == self.iterations
        else:
            assert any(text in str(error) for text in EXPECTED), error
        if number == 0 and error is not None and "closed" not in str(error):
            with contextlib.suppress(poptorch.Error):
                self.elements += self.outfeed.dequeue().tolist()
                self.check_order()

    def check_order(self):
        """Check that all elements that were kept can be read, once each and in order."""
        seen = [x + 1 for x, _ in self.elements]
        assert all(y == -x - 2 for x, y in self.elements)
        statistics = self.outfeed.statistics()
        # The element that makes the queue drop an older one was enqueued before the drop.
        lost = statistics["dropped"] if self.drops_oldest else 0
        assert len(self.elements) == statistics["enqueued"] - lost
        assert seen == sorted(set(seen)), seen


def one_round(seed):
    """Run one round; if it fails, the error contains its seed."""
    before = own_threads()
    try:
        Round(seed).run()
        gc.collect()
        until(lambda: own_threads() <= before)
    except BaseException as error:
        error.add_note(f"one_round({seed}) has failed; threads: {own_threads() - before}")
        raise


def test_some_rounds():
    for seed in range(8):
        one_round(seed)


@pytest.mark.slow
@pytest.mark.timeout(600, method="thread")
@pytest.mark.parametrize("first", range(0, 1000, 50))
def test_a_thousand_rounds(first):
    for seed in range(first, first + 50):
        one_round(1000 + seed)
