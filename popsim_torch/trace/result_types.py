"""Checks that the result of a change in place fits into its tensor.

The shape rules convert the result of most operators, also where PyTorch's kernels refuse it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from popsim_torch.private_torch.trees import tree_leaves
from popsim_torch.trace.eager_errors import error_on_host
from popsim_torch.trace.graph.traced_tensors import in_transform, is_traced
from popsim_torch.trace.in_place import changed_tensor

__all__ = ["check_result_type", "kind_of"]

_REFUSED = "can't be cast to the desired output type"


def check_result_type(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise the error of eager PyTorch if a tensor cannot hold what is written to it.

    Args:
        func: A function of torch.
        name: Its name.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        RuntimeError: It cannot: ``x *= 2.5`` with a tensor of integers.
    """
    targets = [one for one in tree_leaves(changed_tensor(name, args, kwargs)) if is_traced(one)]
    if not targets or in_transform():
        return
    kind = min(map(kind_of, targets))
    if any(kind_of(one) > kind for one in tree_leaves((args, kwargs))):
        error = error_on_host(func, args, kwargs)
        if error is not None and _REFUSED in str(error):
            raise error


def kind_of(value: Any) -> int:
    """Return the place of a value's type among truths (0), integers, reals and complex numbers."""
    if isinstance(value, torch.Tensor):
        if value.is_complex() or value.is_floating_point():
            return 3 if value.is_complex() else 2
        return int(value.dtype != torch.bool)
    kinds = ((bool, 0), (int, 1), (float, 2), (complex, 3))
    return next((kind for type_, kind in kinds if isinstance(value, type_)), 0)
