"""The iterators of a ``torch.utils.data.DataLoader``, and the processes of the one it keeps.

Why: the iterator that ``iter(loader)`` returns is of a class without a public name, and a loop has
to know it from any other iterator. A loader with ``persistent_workers`` keeps its iterator, and so
the processes: a copy of the loader, or one in another process, must not have them, and no method
lets go of them.

Checked: 2.13.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter as BaseDataLoaderIter

__all__ = ["BaseDataLoaderIter", "forget_workers", "state_without_workers"]


def forget_workers(loader: DataLoader[Any]) -> None:
    """Let a loader start processes of its own when it is iterated over next."""
    loader._iterator = None


def state_without_workers(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return what a copy of a loader, or another process, needs of it."""
    return {**vars(loader), "_iterator": None}
