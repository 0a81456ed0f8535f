"""``Peers``: the processes that train one model together, as one of them sees them."""

from __future__ import annotations

import datetime
import itertools
import os
import time
from collections.abc import Callable, Iterable

import torch

from popsim_torch.errors import Error
from popsim_torch.private_torch import process_groups
from popsim_torch.private_torch.process_groups import GlooGroup, Work, part_of
from popsim_torch.processes.meeting import Absent, meet

__all__ = ["Peers", "listed", "tree_sum"]

_SLICE = datetime.timedelta(milliseconds=100)
"""How long to wait before Python's signal handlers may run."""
_ROLL_CALL = 3.0
"""How long to wait, after a failure, for those processes that are still there (seconds)."""
_PAUSE = 0.005
"""How long to wait before looking again whether a process has come (seconds)."""
_RESTART = (
    "Restart all processes from the last checkpoint; torchrun --max-restarts does so by itself."
)
_ALONE = "options.Distributed.disable() if each process is to work by itself."

_numbers = itertools.count()


class Peers:
    """The processes that train one model, connected with each other.

    Each model has a connection of its own, so two models cannot take the tensors of each other.

    Args:
        rank: The number of this process.
        size: The number of processes.
        timeout: The longest time that a process waits for the others (seconds).

    Raises:
        Error: The processes cannot find each other.
    """

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self._timeout = timeout
        self._group: GlooGroup | None = None
        self._left = ""  # why there is no group any more
        _check_can_meet(rank, size)
        # All processes take their models to the device in the same order.
        name = f"popsim_torch/{next(_numbers)}"
        longest = datetime.timedelta(seconds=timeout)
        try:
            place = part_of(process_groups.meeting_store(rank, size, longest), name)
            self._store = part_of(place, meet(place, rank, size, timeout))
            self._group = GlooGroup(self._store, rank, size, longest)
        except Absent as error:
            why = f"within {timeout:g} s: {listed(error.ranks)} did not come"
            raise self._cannot_meet(why) from None
        except RuntimeError as error:
            raise self._cannot_meet(f"({_first_line(error)})") from error

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        """Replace a contiguous tensor by that of process 0.

        Args:
            tensor: Has the same size in all processes.
            what: What is exchanged, for messages.

        Raises:
            Error: A process does not take part.
        """
        if tensor.numel():
            self._exchange(lambda group: group.broadcast(tensor), what)

    def gather(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """Return the tensors of all processes, stacked; see ``broadcast``."""
        out = tensor.new_empty(self.size * tensor.numel())
        self._exchange(lambda group: group.all_gather(out, tensor.reshape(-1)), what)
        return out.reshape(self.size, *tensor.shape)

    def sum(self, numbers: torch.Tensor, what: str) -> None:
        """Replace each number by its sum over all processes.

        All processes get the same bits: numbers are added in pairs of neighbouring processes, then
        in pairs of these sums, and so on.

        Args:
            numbers: A contiguous tensor, whose length is a multiple of the number of processes.
            what: What is exchanged, for messages.

        Raises:
            Error: A process does not take part.
        """
        if self.size == 2:  # the sum of two numbers has only one order
            self._exchange(lambda group: group.all_reduce(numbers), what)
            return
        parts = torch.empty_like(numbers)
        self._exchange(lambda group: group.all_to_all(parts, numbers), what)
        total = tree_sum(list(parts.chunk(self.size)))
        self._exchange(lambda group: group.all_gather(numbers, total), what)

    def close(self) -> None:
        """Leave the other processes."""
        self._leave("has left them")

    def _leave(self, why: str) -> None:
        self._left = self._left or why
        if self._group is not None:
            self._group.leave()
            self._group = None

    def _exchange(self, begin: Callable[[GlooGroup], Work], what: str) -> None:
        """Exchange tensors, and wait until this is done."""
        if self._group is None:
            raise Error(
                f"{what}: this process {self._left}, so it cannot exchange anything with the "
                f"{self.size - 1} other processes. {_RESTART}"
            )
        end = time.monotonic() + self._timeout
        try:
            work = begin(self._group)
            while not _is_over(work):
                if time.monotonic() > end:
                    raise RuntimeError("the time is up")
        except RuntimeError as error:
            raise self._lost(what, error) from error
        except BaseException:  # such as KeyboardInterrupt: the others still wait for the exchange
            self._leave("has broken off an exchange")
            raise

    def _lost(self, what: str, error: RuntimeError) -> Error:
        """Return the error for a failed exchange; it names the processes that are missing."""
        self._leave("has lost the connection to them")
        missing = set(range(self.size)) - self._roll_call()
        who = f"{listed(missing)} of {self.size}" if missing else "another process"
        return Error(
            f"{what}: process {self.rank} of {self.size} waited up to {self._timeout:g} s for "
            f"{who}, which has ended, does not go on, or makes fewer calls ({_first_line(error)}). "
            f"The weights are those after the last whole update. {_RESTART} "
            "Options.Distributed.setTimeout(seconds) sets how long processes wait."
        )

    def _roll_call(self) -> set[int]:
        """Return the processes that have lost the connection like this one, and this one."""
        end = time.monotonic() + _ROLL_CALL
        here = {self.rank}
        try:
            self._store.set(f"lost/{self.rank}", "here")
            while len(here) < self.size and time.monotonic() < end:
                left = set(range(self.size)) - here
                here |= {rank for rank in left if self._store.check([f"lost/{rank}"])}
                time.sleep(_PAUSE)
        except RuntimeError:
            here |= set(range(1, self.size))  # the store ends with the process that has it
        return here

    def _cannot_meet(self, why: str) -> Error:
        place = "the default process group of torch.distributed"
        if process_groups.default_group() is None:
            place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return Error(
            f"Options.Distributed: process {self.rank} of {self.size} cannot meet the others at "
            f"{place} {why}. Each of the processes has to bring the same models to the device, in "
            "the same order. Options.Distributed.setTimeout(seconds) sets how long they wait."
        )


def _check_can_meet(rank: int, size: int) -> None:
    """Raise ``Error`` if it is not known where the processes meet."""
    where = f"Options.Distributed: process {rank} of {size}"
    if not process_groups.is_available():
        raise Error(
            f"{where} cannot exchange gradients, because this build of PyTorch has no gloo. "
            f"Install another one, or call {_ALONE}"
        )
    group = process_groups.default_group()
    if group is not None and group != (rank, size):
        raise Error(
            f"{where} is process {group[0]} of {group[1]} in the default process group of "
            "torch.distributed. Give both the same numbers, for example with "
            "Options.Distributed.configureProcessId(torch.distributed.get_rank(), "
            f"torch.distributed.get_world_size()), or call {_ALONE}"
        )
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if group is None and missing:
        raise Error(
            f"{where} does not know where to meet the others: {' and '.join(missing)} "
            f"{'are' if len(missing) > 1 else 'is'} not set. Start the program with torchrun: "
            f"torchrun --nproc-per-node {size} program.py; or set the address and a free port of "
            f"the machine of process 0; or call torch.distributed.init_process_group; or call "
            f"{_ALONE}"
        )


def _is_over(work: Work) -> bool:
    """Wait for a moment; return whether an exchange is over."""
    try:
        work.wait(_SLICE)
    except RuntimeError:
        if work.is_completed():
            raise
        return False
    return True


def tree_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors, added in pairs of neighbours, then in pairs of these sums."""
    while len(parts) > 1:
        pairs = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[len(pairs) * 2 :]
    return parts[0]


def listed(ranks: Iterable[int]) -> str:
    """Return the numbers of processes as text."""
    names = [str(rank) for rank in sorted(ranks)]
    return f"process {names[0]}" if len(names) == 1 else f"processes {', '.join(names)}"


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else repr(error)
