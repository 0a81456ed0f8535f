"""The memory of the ring buffer: slots of equal size, shared by two processes.

It is a file without a name in any file system, so nothing is left when the processes end in any
way. Other modules decide which process may access a slot.
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
    """Return the descriptor of a new, empty file, which is in memory if that is possible."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("popsim_torch")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Ring:
    """Slots that each hold the tensors of one element.

    Args:
        types: The types of the tensors of an element.
        num_slots: The number of elements in the ring.
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
            when_dead: Called with the slot's number once nothing refers to the memory of these
                tensors any more, including views; in the thread that drops the last reference.
        """
        start = slot * self._slot_bytes
        # A storage keeps a reference to its buffer.
        part = memoryview(self._memory)[start : start + self._slot_bytes]
        if when_dead is not None:
            finalize(part, when_dead, slot).atexit = False
        return [
            torch.frombuffer(part, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)
            if math.prod(shape)
            else torch.empty(shape, dtype=dtype)
            for (dtype, shape), offset in zip(self._types, self._offsets, strict=True)
        ]
