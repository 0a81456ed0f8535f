"""float16 and float32 together: layers and matrix products with operands of two dtypes.

A layer runs in the dtype of its input: weights and biases are cast to it, and their gradients are
cast back to their own dtype; so does a product of an activation and a parameter. Elementwise
operations follow PyTorch's promotion and are not changed here. Everything else is refused if eager
PyTorch refuses it, a product of two activations above all: the shape rules, which a trace follows,
do not look at dtypes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from popsim_torch.errors import UsageRuntimeError
from popsim_torch.private_torch.operators import OpOverload, OpOverloadPacket
from popsim_torch.private_torch.trees import tree_leaves
from popsim_torch.trace.eager_errors import error_on_host
from popsim_torch.trace.graph.device import DEVICE
from popsim_torch.trace.graph.origin import user_line
from popsim_torch.trace.graph.traced_tensors import in_transform, is_traced

__all__ = ["check_types", "in_one_type"]

# Functions whose first argument decides, and the number of tensors after it that follow.
_LAYERS = {
    "bilinear": 4,
    "conv1d": 3,
    "conv2d": 3,
    "conv3d": 3,
    "conv_transpose1d": 3,
    "conv_transpose2d": 3,
    "conv_transpose3d": 3,
    "linear": 3,
}
_KEYWORDS = ("weight", "bias")
# Matrix products, and their number of leading tensor arguments.
_PRODUCTS = {
    "__matmul__": 2,
    "__rmatmul__": 2,
    "addmm": 3,
    "addmv": 3,
    "baddbmm": 3,
    "bmm": 2,
    "dot": 2,
    "matmul": 2,
    "mm": 2,
    "mv": 2,
}
_FLOATING = (torch.float16, torch.float32)
# Layers whose statistics have a dtype of their own; the last is both, in repeated_updates.py.
_WITH_STATISTICS = frozenset({"batch_norm", "instance_norm", "norm_with_statistics"})
_OF_TYPES = re.compile(r"same d?type|same scalar type|expected scalar type|dtypes match|ent dtypes")


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _FLOATING


def in_one_type(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with its tensors in one floating-point dtype.

    Args:
        name: The function's name.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        UsageRuntimeError: Two activations of a product have different dtypes.
    """
    count = _LAYERS.get(name) or _PRODUCTS.get(name)
    if count is None:
        return args, kwargs
    operands = [value for value in args[:count] if _is_floating(value)]
    operands += [kwargs[key] for key in _KEYWORDS if _is_floating(kwargs.get(key))]
    if len({value.dtype for value in operands}) < 2:
        return args, kwargs
    if name in _LAYERS:
        dtype = operands[0].dtype
    else:
        activations = {v.dtype for v in operands if not isinstance(v, torch.nn.Parameter)}
        if len(activations) == 2 and not _is_autocast():
            found = " and ".join(_short(value.dtype) for value in operands)
            raise _refused(name, f"the operands have to have the same dtype, but got {found}")
        dtype = activations.pop() if len(activations) == 1 else torch.float32

    def cast(value: Any) -> Any:
        return value.to(dtype) if _is_floating(value) else value

    cast_args = (*map(cast, args[:count]), *args[count:])
    return cast_args, {k: cast(v) if k in _KEYWORDS else v for k, v in kwargs.items()}


def check_types(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a call with activations in float16 and in float32 if eager PyTorch does.

    Args:
        func: A function of torch.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        UsageRuntimeError: Eager PyTorch needs one dtype.
    """
    found = {
        value.dtype
        for value in tree_leaves((args, kwargs))
        if isinstance(value, torch.Tensor)
        and value.dtype in _FLOATING
        and value.dim() > 0
        and not isinstance(value, torch.nn.Parameter)
        and is_traced(value)
    }
    if len(found) < 2 or isinstance(func, (OpOverload, OpOverloadPacket)):
        return
    name = getattr(func, "__name__", "")
    if name in _WITH_STATISTICS or in_transform() or _is_autocast():
        return
    error = error_on_host(func, args, kwargs)
    if isinstance(error, RuntimeError) and _OF_TYPES.search(str(error)):
        raise _refused(name, str(error))


def _is_autocast() -> bool:
    return torch.is_autocast_enabled(DEVICE.type) or torch.is_autocast_enabled("cpu")


def _refused(name: str, problem: str) -> UsageRuntimeError:
    return UsageRuntimeError(
        f"{name}{user_line(' at ')}: {problem}. Convert one of them, with x.float() or x.half(), "
        "as for eager PyTorch. (Weights and biases of layers need no conversion.)"
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
