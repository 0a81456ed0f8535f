"""What do queues into and out of a running program cost?

First large elements, whose bytes have to be moved: a program is fed with them, or enqueues them,
and the time of a trip is compared with a copy of the same bytes by ``memcpy``. Then a small
element, whose bytes do not matter: its way out of a program, and through Python's own queues.
"""

from __future__ import annotations

import functools
import multiprocessing
import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch

import popsim_torch as poptorch
from benchmarks.common.clock import medians
from benchmarks.common.report import Table, describe_machine, make_parser

ROUND_SECONDS = 0.2
NUM_LARGE = 1 << 18  # float32 of an element of 1 MiB
Call = Callable[[], object]


def copy_of(elements: torch.Tensor) -> Call:
    """Return what copies elements one after another."""
    target = torch.empty_like(elements[0])

    def call() -> None:
        for element in elements:
            target.copy_(element)

    return call


def out_of(element: torch.Tensor, trips: int, when_read: str) -> Call:
    """Return a program that enqueues an element in each trip, and reads them all.

    Args:
        element: What it enqueues.
        trips: How often (count).
        when_read: ``behind``: by one ``dequeue()`` when the program has ended; ``follow``: one by
            one, in another thread; ``nothing``: nothing is enqueued.
    """
    outfeed = poptorch.OutfeedQueue()

    @poptorch.function
    def program(x: torch.Tensor) -> object:
        def body(count: torch.Tensor) -> torch.Tensor:
            if when_read != "nothing":
                outfeed.enqueue(x)
            return count + 1

        return poptorch.repeat(trips, body, inputs=0)

    def read_behind() -> None:
        program(element)
        assert when_read == "nothing" or len(outfeed.dequeue()) == trips

    def followed() -> None:
        counts: list[int] = []
        reader = threading.Thread(target=lambda: counts.append(sum(1 for _ in outfeed.follow())))
        reader.start()
        program(element)
        reader.join()
        assert counts == [trips]

    call = followed if when_read == "follow" else read_behind
    call()
    return call


def into(elements: torch.Tensor) -> Call:
    """Return a program that is fed with elements again and again, one a trip."""
    infeed = poptorch.InfeedQueue(list(elements), repeat=True)

    @poptorch.function
    def program() -> object:
        return poptorch.repeat(
            len(elements), lambda count, x: count + x.reshape(-1)[0], 0.0, infeed
        )

    program()
    return program


class Channel(Protocol):
    """A queue of Python's."""

    def put(self, item: object, /) -> None:
        """Send an object."""

    def get(self) -> object:
        """Wait for an object."""


def sent_through(channel: Channel, element: object, trips: int) -> Call:
    """Return what sends an element again and again to another thread, which takes them all."""
    received: list[int] = []

    def receive() -> None:
        received.append(sum(1 for _ in iter(lambda: channel.get() is None, True)))

    def call() -> None:
        received.clear()
        reader = threading.Thread(target=receive)
        reader.start()
        for _ in range(trips):
            channel.put(element)
        channel.put(None)
        reader.join()
        assert received == [trips]

    call()
    return call


def large_elements(rounds: int, num_elements: int) -> None:
    """Print the table of elements of 1 MiB."""
    table = Table(
        "Elements of 1 MiB",
        ["way", "memcpy, us", "ours, us", "memcpy/ours"],
        "Per element. Target: 0.8. A reader gets what the program wrote, without another copy.",
    )
    elements = torch.randn(num_elements, NUM_LARGE)
    outward = functools.partial(out_of, elements[0], num_elements)
    for name, call in (
        ("into a program", into(elements)),
        ("out of a program, read behind it", outward("behind")),
        ("out of a program, followed", outward("follow")),
    ):
        times = medians({"memcpy": copy_of(elements), "ours": call}, rounds, ROUND_SECONDS)
        memcpy, ours = (1e6 * times[key] / num_elements for key in ("memcpy", "ours"))
        table.row(name, memcpy, ours, memcpy / ours)


def small_elements(rounds: int, trips: int) -> None:
    """Print the table of elements of one number."""
    table = Table(
        "Elements of one number, microseconds",
        ["way", "per element", "of it the trip alone"],
        f"Over {trips} elements. Target: 5 us.",
    )
    element = torch.ones(())
    ours = {
        "read behind the run": out_of(element, trips, "behind"),
        "followed while it runs": out_of(element, trips, "follow"),
    }
    empty = out_of(element, trips, "nothing")
    others = {
        "queue.Queue between threads": sent_through(queue.Queue(), element, trips),
        "multiprocessing.Queue": sent_through(multiprocessing.Queue(), element.numpy(), trips),
    }
    times = medians({"empty": empty, **ours, **others}, rounds, ROUND_SECONDS)
    for name in (*ours, *others):
        alone: str | float = 1e6 * times["empty"] / trips if name in ours else ""
        table.row(name, 1e6 * times[name] / trips, alone)


def main() -> None:
    """Print the tables."""
    parser = make_parser(__doc__, rounds=15)
    parser.add_argument("--large", type=int, default=64, help="elements of 1 MiB per call")
    parser.add_argument("--small", type=int, default=20000, help="small elements per call")
    arguments = parser.parse_args()
    print(describe_machine())
    large_elements(arguments.rounds, arguments.large)
    small_elements(arguments.rounds, arguments.small)


if __name__ == "__main__":
    main()
