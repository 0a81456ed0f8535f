"""Lists and arrays of numbers as indices of traced tensors.

PyTorch makes a tensor of such a list below everything that a trace observes. For a list of one
number it asks the device for memory, which the device of a trace does not have.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_INDEXING = ("__getitem__", "__setitem__")


def with_tensor_indices(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a call, with tensors in the place of lists and arrays of indices.

    Args:
        name: The name of the called function.
        args: Its positional arguments. They stay the same unless it reads or assigns elements.
    """
    if name not in _INDEXING:
        return args
    tensor, index, *others = args
    if isinstance(index, tuple):
        index = tuple(map(_as_tensor, index))
    elif isinstance(index, list) and not all(map(_is_number, index)):
        index = [_as_tensor(item) for item in index]  # PyTorch knows what it means by this
    else:
        index = _as_tensor(index)
    return (tensor, index, *others)


def _as_tensor(item: Any) -> Any:
    if isinstance(item, np.ndarray):
        return torch.from_numpy(item)
    if not isinstance(item, (list, tuple, range)) or not _has_only_numbers(item):
        return item
    numbers = torch.tensor(item)
    return numbers if numbers.numel() else numbers.long()


def _has_only_numbers(item: Any) -> bool:
    if isinstance(item, (list, tuple, range)):
        return all(map(_has_only_numbers, item))
    return _is_number(item)


def _is_number(item: Any) -> bool:
    return isinstance(item, (int, np.integer, np.bool_))
