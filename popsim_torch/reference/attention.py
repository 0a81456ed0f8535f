"""Attention: a product, a map, a softmax and another product, and its gradient.

Between its parts numbers are rounded to the operands' dtype, as separate ops would do.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from popsim_torch.reference.call import Call, op
from popsim_torch.reference.elementwise import run_code
from popsim_torch.reference.sums import softmax_of


def _mapped(
    call: Call, x: Tensor, others: Sequence[Tensor], prefix: str, dtype: torch.dtype
) -> Tensor:
    """Apply a map to scores ``[heads, rows, columns]``; the map reads them in its own shape."""
    if not call[f"{prefix}code"]:
        return x
    shape = call["shape" if not prefix else f"{prefix}shape"]
    inputs = [x.reshape(shape), *others]
    values = run_code(call, inputs, call[f"{prefix}code"], call[f"{prefix}constants"])
    return call.rounded(values[call[f"{prefix}result"]].expand(shape).reshape(x.shape), dtype)


def _probabilities(
    call: Call,
    q: Tensor,
    k: Tensor,
    initial: Tensor | None,
    others: Sequence[Tensor],
    dtype: torch.dtype,
) -> Tensor:
    scores = q @ k
    scores = call.rounded(scores if initial is None else scores + initial, dtype)
    logits = _mapped(call, scores, others, "", dtype)
    return call.rounded(softmax_of(logits, -1, safe=call["safe"]), dtype)


@op
def attention(
    call: Call, q: Tensor, k: Tensor, v: Tensor, initial: Tensor | None = None, *others: Tensor
) -> tuple[Tensor, Tensor]:
    """Return ``softmax(map(q @ k + initial)) @ v``, and the probabilities."""
    dtype = _dtype_of(call, 0)
    p = _probabilities(call, q, k, initial, others, dtype)
    return p @ v, p


@op
def attention_grad(
    call: Call,
    probabilities: Tensor | None,
    q: Tensor | None,
    k: Tensor | None,
    initial: Tensor | None,
    gradient: Tensor | None,
    values: Tensor | None,
    keys: Tensor | None,
    queries: Tensor | None,
    gradients: Tensor | None,
    *others: Tensor,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of q, k and v, from the probabilities or the inputs of the softmax.

    ``values``, ``keys`` and ``queries`` are transposed as the products need them; ``gradients`` is
    the gradient of the result in the form that v's gradient needs.
    """
    count = call["num_others"]
    dtype = _dtype_of(call, 0 if probabilities is not None else 1)
    p = probabilities
    if p is None:
        assert q is not None and k is not None
        p = _probabilities(call, q, k, initial, others[:count], dtype)
    for_v = None if gradients is None else p.mT @ gradients
    if gradient is None or values is None:
        return None, None, for_v
    grad = call.rounded(gradient @ values, dtype)
    grad = call.rounded(p * (grad - (grad * p).sum(-1, keepdim=True)), dtype)
    grad = _mapped(call, grad, others[count:], "grad_", dtype)
    for_q = None if keys is None else grad @ keys
    for_k = None if queries is None else queries @ grad
    return for_q, for_k, for_v


def _dtype_of(call: Call, position: int) -> torch.dtype:
    operand = call.stored[position]
    assert operand is not None
    return operand.dtype
