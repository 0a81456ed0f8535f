"""Functions that compare the results of models."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["allclose"]


def allclose(
    ref: Any,
    other: Any,
    rtol: float = 1e-05,
    atol: float = 1e-08,
    equal_nan: bool = False,
) -> bool:
    """Return whether two results are close: tensors, or nested lists and tuples of tensors.

    Args:
        ref: The expected result.
        other: The actual result. If its structure, types or lengths differ, they are not close.
        rtol: Relative tolerance of ``torch.allclose``.
        atol: Absolute tolerance of ``torch.allclose``.
        equal_nan: Whether NaN is close to NaN.

    Raises:
        RuntimeError: Tensors cannot be compared: their shapes or dtypes differ.
    """
    if isinstance(ref, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.allclose(ref, other, rtol=rtol, atol=atol, equal_nan=equal_nan)
    if type(ref) is not type(other):
        return False
    if isinstance(ref, (list, tuple)):
        return len(ref) == len(other) and all(
            allclose(one, another, rtol, atol, equal_nan)
            for one, another in zip(ref, other, strict=True)
        )
    return bool(ref == other)
