"""Arguments of PyTorch's functions that have to be numbers of Python's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from popsim_torch.optimizer_steps.numbers import StepNumber
from popsim_torch.private_torch.modes import TorchDispatchMode

__all__ = ["called_with_tensors", "value_if_known"]


class _WithoutValues(TorchDispatchMode):
    """Fails in functions that read the value of a tensor."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise TypeError("it takes plain numbers of Python only")
        return func(*args, **(kwargs or {}))


def called_with_tensors(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call a function of PyTorch with tensors in place of numbers.

    Raises:
        TypeError: It takes no tensors there.
    """
    with _WithoutValues():
        return func(*args, **kwargs)


def value_if_known(value: Any) -> Any:
    """Return the present value of a hyper-parameter, which is noted; other values as they are."""
    return float(value) if isinstance(value, StepNumber) and value.known is not None else value
