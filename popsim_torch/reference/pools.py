"""Pooling over windows of images, and its gradient."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from popsim_torch.reference.call import Call, grad_of, op


def _average(call: Call, x: Tensor) -> Tensor:
    if call.get("output_size") is not None:
        return F.adaptive_avg_pool2d(x, call["output_size"])
    return F.avg_pool2d(
        *(x, call["kernel"], call["stride"], call["padding"], call["ceil"]),
        count_include_pad=call.get("count_include_pad", False),
        divisor_override=call.get("divisor", 0) or None,
    )


@op
def average_pool(call: Call, x: Tensor) -> Tensor:
    """Return the mean of each window; the result's shape may determine the windows."""
    return _average(call, x)


@op
def average_pool_grad(call: Call, grad_y: Tensor) -> Tensor:
    """Return the gradient of the input: the gradient of each window, divided evenly."""
    x = grad_y.new_zeros(call["input_shape"])
    return grad_of(lambda x: _average(call, x), x, grad_y)


@op
def max_pool(call: Call, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest element of each window, and its index in the image's plane."""
    return F.max_pool2d_with_indices(
        *(x, call["kernel"], call["stride"], call["padding"], call["dilation"], call["ceil"])
    )


@op
def max_pool_grad(call: Call, grad_y: Tensor, indices: Tensor) -> Tensor:
    """Return the gradient of the input: each window's goes to its largest element."""
    shape = call["input_shape"]
    flat = grad_y.new_zeros(*shape[:2], shape[2] * shape[3])
    return flat.scatter_add(2, indices.flatten(2).long(), grad_y.flatten(2)).reshape(shape)
