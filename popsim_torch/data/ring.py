"""The memory of the ring buffer: slots of equal size, shared by two processes.

It is a file that has no name in any file system, so that nothing stays behind, however the
processes end. Which process may touch a slot is for others to agree on.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from weakref import finalize

import torch

from popsim_torch.data.layout import TensorType

__all__ = ["Ring", "nameless_file"]

_ALIGNMENT = 64  # bytes: a cache line, and the widest vector


def nameless_file() -> int:
    """Return the descriptor of a new, empty file that lies in memory where that is possible."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("popsim_torch")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Ring:
    """Slots that each hold the tensors of one element.

    Args:
        types: The tensors of an element.
        num_slots: How many elements there is room for.
        file: The descriptor of the memory, which stays open; it grows to the size that is needed.
    """

    def __init__(self, types: Sequence[TensorType], num_slots: int, file: int) -> None:
        self._types = list(types)
        self._offsets = []
        num_bytes = 0
        for dtype, shape in self._types:
            self._offsets.append(num_bytes)
            tensor_bytes = math.prod(shape) * dtype.itemsize
            num_bytes += -(-tensor_bytes // _ALIGNMENT) * _ALIGNMENT
        self._slot_bytes = max(num_bytes, _ALIGNMENT)
        if os.fstat(file).st_size < num_slots * self._slot_bytes:
            os.ftruncate(file, num_slots * self._slot_bytes)
        self._memory = mmap.mmap(file, num_slots * self._slot_bytes)

    def tensors(
        self, slot: int, when_dead: Callable[[int], object] | None = None
    ) -> list[torch.Tensor]:
        """Return the tensors of a slot; they keep the memory alive.

        Args:
            slot: The number of the slot.
            when_dead: Called with it once nothing refers to these tensors' memory any more, views
                of them included; by whichever thread drops the last of them.
        """
        start = slot * self._slot_bytes
        # Storages hold on to the buffer they were made of.
        part = memoryview(self._memory)[start : start + self._slot_bytes]
        if when_dead is not None:
            finalize(part, when_dead, slot).atexit = False
        return [
            torch.frombuffer(part, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)
            if math.prod(shape)
            else torch.empty(shape, dtype=dtype)
            for (dtype, shape), offset in zip(self._types, self._offsets, strict=True)
        ]
