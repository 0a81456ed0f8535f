"""Running products as one operator, and their gradient as another.

PyTorch computes the gradient of ``torch.cumprod`` from two dozen operators, because it divides by
elements that may be zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from popsim_torch.private_torch.functorch import is_functorch_wrapped_tensor
from popsim_torch.trace.own_operators import define_with_gradient

_FLOATING = (torch.float16, torch.float32, torch.bfloat16)


def _cumprod(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.new_empty(x.shape)


def _cumprod_grad(
    gradient: torch.Tensor, x: torch.Tensor, y: torch.Tensor, dim: int
) -> torch.Tensor:
    return x.new_empty(x.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, ctx.dim = inputs
    ctx.save_for_backward(x, output)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    x, y = ctx.saved_tensors
    if torch.is_grad_enabled():  # a gradient of the gradient may follow
        return torch.ops.aten.cumprod_backward(gradient, x, ctx.dim, y), None
    return torch.ops.popsim.cumprod_grad(gradient, x, y, ctx.dim), None


# The operators exist as long as this object.
_library = define_with_gradient(
    "cumprod",
    (
        "cumprod(Tensor x, int dim) -> Tensor",
        "cumprod_grad(Tensor gradient, Tensor x, Tensor y, int dim) -> Tensor",
    ),
    (_cumprod, _cumprod_grad),
    _backward,
    _keep_for_backward,
    "torch.cumprod within another gradient.",
)

CUMPROD = torch.ops.popsim.cumprod.default
CUMPROD_GRAD = torch.ops.popsim.cumprod_grad.default


def cumprod_call(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], torch.Tensor] | None:
    """Return a function that computes a call of ``torch.cumprod``; None to leave it to PyTorch.

    Args:
        args: The positional arguments of the call.
        kwargs: The keyword arguments of the call.
    """
    x, *rest = args or (None,)
    dim = rest[0] if len(rest) == 1 else kwargs.get("dim") if set(kwargs) == {"dim"} else None
    if not isinstance(x, torch.Tensor) or type(dim) is not int or len(rest) + len(kwargs) != 1:
        return None
    covered = (
        x.dtype in _FLOATING
        and x.numel() > 0
        and -x.dim() <= dim < x.dim()
        and x.requires_grad
        and torch.is_grad_enabled()
        # Transforms and derivatives in forward direction need PyTorch's own operator.
        and not is_functorch_wrapped_tensor(x)
        and forward_ad.unpack_dual(x).tangent is None  # type: ignore[no-untyped-call]
    )
    return (lambda: torch.ops.popsim.cumprod(x, dim % x.dim())) if covered else None
