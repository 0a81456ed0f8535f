"""Calls with complex numbers that PyTorch computes in double precision, or cannot trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from popsim_torch.errors import Error
from popsim_torch.trace.graph.origin import user_line

_FLOAT_POWERS: dict[Any, bool] = {  # whether the call changes its argument
    torch.float_power: False,
    torch.Tensor.float_power: False,
    torch.Tensor.float_power_: True,
}
_RENORMS: dict[Any, bool] = {
    torch.renorm: False,
    torch.Tensor.renorm: False,
    torch.Tensor.renorm_: True,
}
_FILLS = frozenset({torch.masked_fill, torch.Tensor.masked_fill, torch.Tensor.masked_fill_})
_EPSILON = 1e-7  # as in PyTorch's renorm


def complex_call(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """Return a replacement for a function, or None to call the function.

    Args:
        func: A function of torch.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    if func in _FLOAT_POWERS and any(map(_is_complex, (*args, *kwargs.values()))):
        return functools.partial(_float_power, *args, **kwargs, in_place=_FLOAT_POWERS[func])
    if func in _RENORMS and _needs_gradient(args):
        return functools.partial(_renorm, *args, **kwargs, in_place=_RENORMS[func])
    if func in (torch.mean, torch.Tensor.mean) and args and _is_complex(args[0]):
        dtype = kwargs.get("dtype")
        if dtype is not None and dtype.is_floating_point:  # the kernel does not convert the sum
            return functools.partial(func, args[0].real, *args[1:], **kwargs)
    if func in _FILLS and len(args) == 3 and not _is_complex(args[0]) and _is_complex(args[2]):
        return functools.partial(func, *args[:2], _real(args[2]))
    return None


def _real(value: Any) -> Any:
    """Return the number that is written at a mask; only one without imaginary part can be."""
    if isinstance(value, complex):
        return value if value.imag else value.real
    raise Error(
        f"masked_fill{user_line(' at ')}: the value is a complex tensor, and the tensor is not. "
        "Pass the real part: value.real."
    )


def _needs_gradient(args: tuple[Any, ...]) -> bool:
    return bool(args) and _is_complex(args[0]) and torch.is_grad_enabled() and args[0].requires_grad


def _is_complex(value: Any) -> bool:
    return isinstance(value, complex) or (isinstance(value, torch.Tensor) and value.is_complex())


def _float_power(base: Any, exponent: Any, *, in_place: bool) -> torch.Tensor:
    operands = (base.clone() if in_place else base, exponent)
    held = (v.to(torch.complex64) if isinstance(v, torch.Tensor) else v for v in operands)
    result = torch.pow(*held)
    return base.copy_(result) if in_place else result


def _renorm(x: torch.Tensor, p: float, dim: int, maxnorm: float, *, in_place: bool) -> torch.Tensor:
    """Compute ``renorm``; PyTorch's gradient of it has factors in double precision."""
    with torch.no_grad():
        torch.renorm(x, p, dim, maxnorm)  # its errors are those of PyTorch; nobody reads it
    others = [axis for axis in range(x.dim()) if axis != dim % x.dim()]
    given = x.clone() if in_place else x
    norm = torch.linalg.vector_norm(given, p, others, keepdim=True)
    result = given * torch.where(norm > maxnorm, maxnorm / (norm + _EPSILON), 1.0)
    return x.copy_(result) if in_place else result
