"""Reductions, cumulative sums and softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from popsim_torch.errors import Error
from popsim_torch.reference.call import Call, op


@op
def reduce(call: Call, x: Tensor) -> Tensor:
    """Return the sum, the mean or an extreme over some axes."""
    if not call["axes"]:
        return x
    function = getattr(torch, call["function"])
    return function(x, call["axes"], keepdim=call["keepdim"])  # type: ignore[no-any-return]


@op
def cumsum(call: Call, x: Tensor) -> Tensor:
    """Return sums up to each position of an axis."""
    return x.cumsum(call["axis"])


@op
def cumprod(call: Call, x: Tensor) -> Tensor:
    """Return products up to each position of an axis."""
    return x.cumprod(call["axis"])


@op
def cumprod_grad(call: Call, gradient: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of the factors of running products."""
    axis = call["axis"]
    first, earlier = torch.ones_like(y.narrow(axis, 0, 1)), y.narrow(axis, 0, y.shape[axis] - 1)
    before = torch.cat([first, earlier], axis)
    rest = torch.zeros_like(x.select(axis, 0))
    sums = []
    for factor, part in zip(reversed(x.unbind(axis)), reversed(gradient.unbind(axis)), strict=True):
        sums.append(part + rest)
        rest = factor * sums[-1]
    return before * torch.stack(sums[::-1], axis)


@op
def running_extreme(call: Call, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the extreme up to each position of an axis, and where it is."""
    function = torch.cummax if call["function"] == "max" else torch.cummin
    values, positions = function(x, call["axis"])
    return values, positions


@op
def logcumsumexp(call: Call, x: Tensor) -> Tensor:
    """Return logarithms of the sums of exponentials up to each position of an axis."""
    return x.logcumsumexp(call["axis"])


def softmax_of(x: Tensor, axis: int, *, safe: bool = False) -> Tensor:
    """Return the softmax; with ``safe``, rows in which all values are minus infinity give zeros."""
    y = x.softmax(axis)
    return torch.where((x == -torch.inf).all(axis, keepdim=True), 0.0, y) if safe else y


@op
def softmax(call: Call, x: Tensor) -> Tensor:
    """Return the softmax along an axis, or its logarithm."""
    if call["log"]:
        return x.log_softmax(call["axis"])
    return softmax_of(x, call["axis"], safe=call.get("safe", False))


@op
def softmax_grad(call: Call, gradient: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of the input, given the result."""
    axis = call["axis"]
    if call["log"]:
        return gradient - y.exp() * gradient.sum(axis, keepdim=True)
    return y * (gradient - (gradient * y).sum(axis, keepdim=True))


@op
def finite(call: Call, *x: Tensor) -> None:
    """End the run if a checked tensor has NaN or an infinity.

    After an update nothing is left to check. A late check fails nothing itself.
    """
    num_checked = len(x) - call["kept"] - call["divisors"]
    if call["after"] or call["late"]:
        return
    for number, value in enumerate(x[:num_checked]):
        if not bool(value.isfinite().all()):
            raise Error(f"Interpreter: input {number} of '{call.op.name}' has NaN or an infinity.")


@op
def within(call: Call, x: Tensor) -> None:
    """End the run if an element is NaN or out of range."""
    if not bool(((x >= call["least"]) & (x <= call["most"])).all()):
        raise Error(f"Interpreter: '{call.op.name}': {call['message']}")
