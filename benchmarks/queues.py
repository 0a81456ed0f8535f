"""How much do queues into and out of a running program cost?

The first test has large elements, whose bytes must be copied: a program takes them from a queue, or
enqueues them, and the time of an iteration is compared with a copy of the same bytes by ``memcpy``.
The second test has a small element, whose bytes do not matter: it goes out of a program, and
through Python's own queues.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import multiprocessing
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

import popsim_torch as poptorch
from benchmarks.common.clock import medians
from benchmarks.common.report import Table, describe_machine, make_parser

ROUND_SECONDS = 0.2
NUM_LARGE = 1 << 18  # number of float32 values in an element of 1 MiB
Call = Callable[[], object]


def copies(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], count: int) -> Call:
    """Return a function that copies elements with ``memcpy``, in one thread, as a program does.

    Args:
        sources: The sources of the copies, used alternately.
        targets: The targets of the copies, used alternately.
        count: How many elements to copy.
    """
    move = ctypes.CDLL(None).memcpy
    move.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    num_bytes = sources[0].nbytes
    to, from_ = ([tensor.data_ptr() for tensor in tensors] for tensors in (targets, sources))

    def call(_kept: object = (sources, targets)) -> None:  # keeps the memory alive
        for i in range(count):
            move(to[i % len(to)], from_[i % len(from_)], num_bytes)

    return call


def copies_to_fresh_memory(source: torch.Tensor, count: int) -> Call:
    """Return a function that copies an element into new memory for all copies."""

    def call() -> None:
        copies([source], torch.empty(count, *source.shape), count)()

    return call


def out_of(element: torch.Tensor, iterations: int, when_read: str) -> Call:
    """Return a function that runs a program that enqueues elements, and reads all of them.

    Args:
        element: The element that it enqueues.
        iterations: Number of iterations.
        when_read: ``after``: one ``dequeue()`` when the program has ended; ``newest``: the same,
            for the last element only; ``follow``: one by one, in another thread; ``nothing``: the
            program enqueues nothing.
    """
    modes = poptorch.OutfeedMode
    outfeed = poptorch.OutfeedQueue(modes.LAST if when_read == "newest" else modes.ALL)

    @poptorch.function
    def program(x: torch.Tensor) -> object:
        def body(count: torch.Tensor) -> torch.Tensor:
            if when_read != "nothing":
                outfeed.enqueue(x)
            return count + 1

        return poptorch.repeat(iterations, body, inputs=0)

    def read_behind() -> None:
        program(element)
        if when_read != "nothing":
            shape = element.shape if when_read == "newest" else (iterations, *element.shape)
            assert outfeed.dequeue().shape == shape

    def followed() -> None:
        counts: list[int] = []
        reader = threading.Thread(target=lambda: counts.append(sum(1 for _ in outfeed.follow())))
        reader.start()
        program(element)
        reader.join()
        assert counts == [iterations]

    call = followed if when_read == "follow" else read_behind
    call()
    return call


def into(elements: torch.Tensor) -> Call:
    """Return a program that takes an element from a queue in each iteration."""
    infeed = poptorch.InfeedQueue(list(elements), repeat=True)

    @poptorch.function
    def program() -> object:
        return poptorch.repeat(
            len(elements), lambda count, x: count + x.reshape(-1)[0], 0.0, infeed
        )

    program()
    return program


class Channel(Protocol):
    """A queue of Python."""

    def put(self, item: object, /) -> None:
        """Send an object."""

    def get(self) -> object:
        """Wait for an object."""


def sent_through(channel: Channel, element: object, iterations: int) -> Call:
    """Return a function that sends an element repeatedly to a thread that takes all of them."""
    received: list[int] = []

    def receive() -> None:
        received.append(sum(1 for _ in iter(lambda: channel.get() is None, True)))

    def call() -> None:
        received.clear()
        reader = threading.Thread(target=receive)
        reader.start()
        for _ in range(iterations):
            channel.put(element)
        channel.put(None)
        reader.join()
        assert received == [iterations]

    call()
    return call


def tensorflow_queues(iterations: int) -> dict[str, Call]:
    """Return TensorFlow's queue, read after or during a loop that fills it, if it is installed."""
    if importlib.util.find_spec("tensorflow") is None:
        return {}
    tf: Any = importlib.import_module("tensorflow")
    channel, element = tf.queue.FIFOQueue(iterations, [tf.float32], shapes=[[]]), tf.ones(())

    @tf.function  # type: ignore[untyped-decorator]
    def fill() -> None:
        for _ in tf.range(iterations):
            channel.enqueue(element)

    def behind() -> None:
        fill()
        assert channel.dequeue_many(iterations).shape == (iterations,)

    def followed() -> None:
        reader = threading.Thread(target=lambda: [channel.dequeue() for _ in range(iterations)])
        reader.start()
        fill()
        reader.join()

    calls: dict[str, Call] = {
        "tf.queue.FIFOQueue after a tf.function": behind,
        "the same, followed": followed,
    }
    for call in calls.values():
        call()
    return calls


def large_elements(rounds: int, num_elements: int) -> None:
    """Print the table of elements of 1 MiB."""
    table = Table(
        "Elements of 1 MiB",
        ["way", "memcpy, us", "ours, us", "memcpy/ours"],
        "Per element. Target: 0.8. memcpy moves the same bytes between the same number of places: "
        "from many to one, from one to two alternately, and into memory that is new in each call, "
        "as a program needs that reads all elements after a run.",
    )
    elements = torch.randn(num_elements, NUM_LARGE)
    one = elements[0]
    outward = functools.partial(out_of, one, num_elements)
    in_turn = copies([one], [torch.zeros_like(one) for _ in range(2)], num_elements)
    for name, memcpy, call in (
        (
            "into a program",
            copies(elements, [torch.zeros_like(one)], num_elements),
            into(elements),
        ),
        ("out of a program, the newest kept", in_turn, outward("newest")),
        ("out of a program, followed", in_turn, outward("follow")),
        (
            "out of a program, read after it",
            copies_to_fresh_memory(one, num_elements),
            outward("after"),
        ),
    ):
        times = medians({"memcpy": memcpy, "ours": call}, rounds, ROUND_SECONDS)
        copied, moved = (1e6 * times[key] / num_elements for key in ("memcpy", "ours"))
        table.row(name, copied, moved, copied / moved)


def small_elements(rounds: int, iterations: int) -> None:
    """Print the table of elements of one number."""
    table = Table(
        "Elements of one number, microseconds",
        ["way", "per element", "of it the iteration alone"],
        f"Over {iterations} elements. Target: 5 us.",
    )
    element = torch.ones(())
    ours = {
        "read after the run": out_of(element, iterations, "after"),
        "followed while it runs": out_of(element, iterations, "follow"),
    }
    empty = out_of(element, iterations, "nothing")
    others = {
        "queue.Queue between threads": sent_through(queue.Queue(), element, iterations),
        "multiprocessing.Queue": sent_through(multiprocessing.Queue(), element.numpy(), iterations),
        "torch.multiprocessing.Queue": sent_through(
            torch.multiprocessing.Queue(), element, iterations // 20
        ),
        **tensorflow_queues(iterations),
    }
    times = medians({"empty": empty, **ours, **others}, rounds, ROUND_SECONDS)
    for name in (*ours, *others):
        alone: str | float = 1e6 * times["empty"] / iterations if name in ours else ""
        count = iterations // 20 if name.startswith("torch") else iterations  # this queue is slow
        table.row(name, 1e6 * times[name] / count, alone)


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
