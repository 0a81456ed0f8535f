"""float16 and float32 together: layers and matrix products with operands of two dtypes.

A layer runs in the dtype of its input: weights and biases are cast to it, and their gradients are
cast back to their own dtype. A product of two activations runs in float32. Elementwise operations
follow PyTorch's promotion and are not changed here.
"""

from __future__ import annotations

from typing import Any

import torch

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
        dtype = activations.pop() if len(activations) == 1 else torch.float32

    def cast(value: Any) -> Any:
        return value.to(dtype) if _is_floating(value) else value

    cast_args = (*map(cast, args[:count]), *args[count:])
    return cast_args, {k: cast(v) if k in _KEYWORDS else v for k, v in kwargs.items()}
