"""Groups of processes that exchange tensors over gloo, without the default group.

Why: a program may make the default group of ``torch.distributed`` itself, and only once, so this
package must not make it. The functions of ``torch.distributed`` for groups need the default group;
a ``ProcessGroupGloo`` of its own needs only a store, in which the processes find each other.

Checked: 2.13.
"""

from __future__ import annotations

import atexit
import datetime
import functools
import os
import threading
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

__all__ = [
    "GlooGroup",
    "Store",
    "Work",
    "default_group",
    "is_available",
    "meeting_store",
    "part_of",
]


_AT_EXIT = 5.0
"""How long the end of Python waits for connections to close (seconds)."""


class Work(Protocol):
    """An exchange that has begun."""

    def wait(self, timeout: datetime.timedelta) -> bool:
        """Wait until the exchange is over; RuntimeError: it is not, or it has failed."""

    def is_completed(self) -> bool:
        """Return whether the exchange is over, or has failed."""


class Store(Protocol):
    """Where processes leave values for each other."""

    def set(self, key: str, value: str) -> None:
        """Leave a value."""

    def get(self, key: str) -> bytes:
        """Return a value; wait until there is one."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have a value."""


def is_available() -> bool:
    """Return whether this build of PyTorch can exchange tensors between processes."""
    return dist.is_available() and dist.is_gloo_available()


def default_group() -> tuple[int, int] | None:
    """Return the rank and the size of the default group; None if there is none."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None


def meeting_store(rank: int, size: int, timeout: datetime.timedelta) -> Store:
    """Return a store that all processes can reach.

    It is that of the default group, or else one at ``MASTER_ADDR`` and ``MASTER_PORT``.

    Args:
        rank: The number of this process.
        size: The number of processes.
        timeout: The longest time that this may take.

    Raises:
        RuntimeError: The other processes cannot be reached.
    """
    any_dist: Any = dist
    if dist.is_initialized():
        return cast(Store, any_dist.distributed_c10d._get_default_store())
    return _store_at(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], rank, size, timeout)


@functools.cache
def _store_at(address: str, port: str, rank: int, size: int, timeout: datetime.timedelta) -> Store:
    """Return the store at an address, which stays open: process 0 may have it."""
    any_dist: Any = dist
    store, _, _ = next(any_dist.rendezvous("env://", rank, size, timeout=timeout))
    return cast(Store, store)


def part_of(store: Store, name: str) -> Store:
    """Return the keys of a store that begin with a name, as a store of their own."""
    any_dist: Any = dist
    return cast(Store, any_dist.PrefixStore(name, store))


class GlooGroup:
    """Processes that are connected with each other; each does the same exchanges in one order.

    The functions begin an exchange; the result says when it is over.

    Args:
        store: Only this group uses it.
        rank: The number of this process.
        size: The number of processes.
        timeout: The longest time that connecting or an exchange may take.

    Raises:
        RuntimeError: The processes cannot be connected.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
        any_dist: Any = dist
        self._group = any_dist.ProcessGroupGloo(store, rank, size, timeout)

    def leave(self) -> None:
        """Close the connections; an exchange that has begun ends with an error, maybe later."""
        # The destructor waits for such an exchange.
        last = [self.__dict__.pop("_group")]
        thread = threading.Thread(target=last.clear, daemon=True)
        thread.start()
        # A thread that comes back from a destructor when Python has ended would end the process.
        atexit.register(thread.join, _AT_EXIT)

    def all_reduce(self, tensor: torch.Tensor) -> Work:
        """Replace a tensor by the sum over all processes."""
        return cast(Work, self._group.allreduce([tensor]))

    def broadcast(self, tensor: torch.Tensor) -> Work:
        """Replace a tensor by that of process 0."""
        any_dist: Any = dist
        return cast(Work, self._group.broadcast([tensor], any_dist.BroadcastOptions()))

    def all_to_all(self, out: torch.Tensor, tensor: torch.Tensor) -> Work:
        """Give each process the part of a tensor with its number; get those of all processes."""
        return cast(Work, self._group.alltoall_base(out, tensor, [], []))

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> Work:
        """Write the tensors of all processes one after the other."""
        return cast(Work, self._group._allgather_base(out, tensor))
