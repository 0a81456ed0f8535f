"""Matrix products and convolutions.

Partial sums in float16 (``partials``) would add rounding, and so may operands that need fewer bits
(``precision``); this is not done here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from popsim_torch.reference.call import Call, op


@op
def matmul(
    call: Call, a: Tensor, b: Tensor, bias: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """Return ``alpha * a @ b + beta * bias``, zero where it or the mask is not above zero."""
    out = a @ b
    if (alpha := call.get("alpha", 1.0)) != 1:
        out = alpha * out
    if bias is not None and (beta := call.get("beta", 1.0)) != 0:
        out = out + beta * bias
    if call.get("activation") == "relu":
        out = torch.where(out <= 0, 0.0, out)
    return out if mask is None else torch.where(mask <= 0, 0.0, out)


@op
def serialized_matmul(call: Call, a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b``; the slices only determine the order of computation."""
    return a @ b


@op
def convolution(call: Call, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a convolution, or a transposed one, of one to three dimensions."""
    return torch.convolution(
        *(x, weight, bias, call["stride"], call["padding"], call["dilation"]),
        *(call["transposed"], call["output_padding"], call["groups"]),
    )


def _convolution_grad(call: Call, grad: Tensor, x: Tensor, weight: Tensor, which: int) -> Tensor:
    wanted = [position == which for position in range(3)]
    found = torch.ops.aten.convolution_backward(
        *(grad, x, weight, None, call["stride"], call["padding"], call["dilation"]),
        *(call["transposed"], call["output_padding"], call["groups"], wanted),
    )
    return found[which]  # type: ignore[no-any-return]


@op
def convolution_grad_input(call: Call, grad_y: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the input."""
    return _convolution_grad(call, grad_y, weight.new_empty(call["input_shape"]), weight, 0)


@op
def convolution_grad_weight(call: Call, grad_y: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of the weight."""
    return _convolution_grad(call, grad_y, x, x.new_empty(call["weight_shape"]), 1)
