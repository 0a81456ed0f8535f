"""What a function does outside of its loops: next to nothing, and that once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from popsim_torch.errors import Error
from popsim_torch.trace.graph.origin import user_line

_METADATA_METHODS = frozenset(
    [
        "size",
        "dim",
        "numel",
        "nelement",
        "element_size",
        "is_floating_point",
        "is_complex",
        "stride",
        "is_contiguous",
        "ndimension",
        "__len__",
        "is_signed",
        "get_device",
        "__hash__",
    ]
)
_METADATA_ATTRIBUTES = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ["shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "is_cpu"]
)


class OutsideOfLoops(TorchFunctionMode):
    """Refuses computations with tensors that differ from call to call, outside of loops.

    Args:
        is_value: Whether a tensor is an argument of the function or the result of a loop.
    """

    def __init__(self, is_value: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self._is_value = is_value

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one call of a torch function, or refuse it."""
        name = getattr(func, "__name__", "")
        if func not in _METADATA_ATTRIBUTES and name not in _METADATA_METHODS:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and self._differs(leaf):
                    raise Error(
                        f"poptorch.function: '{name}' is computed{user_line(' at ')} outside of a "
                        "loop, from an argument of the function, a weight, or the result of a "
                        "loop. The device runs loops: compute in the body of poptorch.repeat, or "
                        "return the tensor and compute where the function was called."
                    )
        return func(*args, **(kwargs or {}))

    def _differs(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) or self._is_value(tensor)
