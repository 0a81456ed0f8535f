"""``torch.ctc_loss`` as an own operator: PyTorch's reads the lengths to determine a shape.

``popsim::ctc_loss`` computes the loss of each item, and another operator its gradient; PyTorch's
own functions reduce the losses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from popsim_torch.trace.graph.device import DEVICE
from popsim_torch.trace.own_operators import define_with_gradient

_SCHEMAS = (
    "ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, "
    "int blank, bool zero_infinity) -> (Tensor loss, Tensor alpha)",
    "ctc_loss_grad(Tensor gradient, Tensor log_probs, Tensor targets, Tensor input_lengths, "
    "Tensor target_lengths, Tensor alpha, int blank, bool zero_infinity) -> Tensor",
)
_INDICES = (torch.int32, torch.int64)
_NONE, _MEAN, _SUM = range(3)  # values of torch's enum of reductions


def _ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty results: a loss per item, and the values of each step for the gradient."""
    steps, items, _classes = log_probs.shape
    alpha = log_probs.new_empty((steps, 2 * targets.numel() + items), dtype=torch.float32)
    return log_probs.new_empty((items,)), alpha


def _ctc_loss_grad(_gradient: torch.Tensor, log_probs: torch.Tensor, *_: object) -> torch.Tensor:
    return log_probs.new_empty(log_probs.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[1])


def _backward(ctx: Any, gradient: Any, _alpha: object) -> tuple[Any, ...]:
    if gradient is not None:
        gradient = torch.ops.popsim.ctc_loss_grad(
            gradient, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity
        )
    return (gradient, None, None, None, None, None)


# The operators exist as long as this object.
_library = define_with_gradient(
    "ctc_loss",
    _SCHEMAS,
    (_ctc_loss, _ctc_loss_grad),
    _backward,
    _keep_for_backward,
    "ctc_loss: torch.autograd.grad(..., create_graph=True) through torch.nn.CTCLoss.",
)

CTC_LOSS = torch.ops.popsim.ctc_loss.default
CTC_LOSS_GRAD = torch.ops.popsim.ctc_loss_grad.default


def _traced(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor | Sequence[int],
    target_lengths: torch.Tensor | Sequence[int],
    blank: int = 0,
    reduction: int = _NONE,  # the default in Python, which differs from the operator's schema
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Compute ``torch.ctc_loss``."""
    is_batch = log_probs.dim() == 3
    if not is_batch:
        log_probs = log_probs.unsqueeze(1)
    _check(log_probs, targets, blank)
    steps, items, _classes = log_probs.shape
    if targets.dtype not in _INDICES:
        targets = targets.long()
    of_inputs = _lengths("input_lengths", input_lengths, items, steps)
    of_targets = _lengths("target_lengths", target_lengths, items, targets.shape[-1])
    if targets.dim() == 1 and not isinstance(target_lengths, torch.Tensor):
        _check_sum(targets, sum(map(int, target_lengths)))
    loss: torch.Tensor
    loss, _ = torch.ops.popsim.ctc_loss(
        log_probs, targets, of_inputs, of_targets, blank, zero_infinity
    )
    if reduction == _MEAN:
        return torch.mean(loss / of_targets.to(loss.dtype).clamp(min=1))
    if reduction == _SUM:
        return torch.sum(loss)
    return loss if is_batch else loss.squeeze(0)


def _check(log_probs: torch.Tensor, targets: torch.Tensor, blank: int) -> None:
    """Refuse what PyTorch refuses, with its messages if they are clear."""
    if log_probs.dim() != 3:
        raise RuntimeError(
            "ctc_loss: log_probs must have 3 dimensions (steps, batch, classes), or 2 without a "
            f"batch; got shape {tuple(log_probs.squeeze(1).shape)}."
        )
    if not log_probs.is_floating_point():
        raise RuntimeError(f"ctc_loss: log_probs must be floating-point, got {log_probs.dtype}.")
    if log_probs.numel() == 0:
        raise RuntimeError("log_probs tensor must not be empty")
    if not 0 <= blank < log_probs.shape[2]:
        raise RuntimeError("blank must be in label range")
    items = log_probs.shape[1]
    if targets.dim() != 1 and (targets.dim() != 2 or targets.shape[0] != items):
        raise RuntimeError(
            f"ctc_loss: targets must have shape (batch, labels) with a batch of {items}, or one "
            f"dimension with the labels of all items; got shape {tuple(targets.shape)}."
        )


def _check_sum(targets: torch.Tensor, total: int) -> None:
    """Refuse concatenated targets whose length is not the sum of the target lengths."""
    if targets.shape[0] != total:
        raise RuntimeError(
            f"ctc_loss: the target lengths add up to {total}, but the concatenated targets have "
            f"{targets.shape[0]} labels."
        )


def _lengths(
    name: str, lengths: torch.Tensor | Sequence[int], items: int, most: int
) -> torch.Tensor:
    """Return one length per item as a tensor; check lengths that are known."""
    if isinstance(lengths, torch.Tensor):
        if lengths.is_floating_point() or lengths.dtype == torch.bool:
            raise RuntimeError(f"{name} must be integral")
        tensor = lengths if lengths.dim() == 1 else lengths.reshape(-1)
    else:
        known = [int(length) for length in lengths]
        for length in known:
            if not 0 <= length <= most:
                raise RuntimeError(
                    f"Expected {name} to have values from 0 to {most}, but got value {length}"
                )
        tensor = torch.tensor(known, dtype=torch.int64, device=DEVICE)
    if tensor.shape[0] != items:
        raise RuntimeError(f"{name} must be of size batch_size")
    return tensor if tensor.dtype in _INDICES else tensor.long()


def ctc_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], torch.Tensor] | None:
    """Return a function that computes a call of ``torch.ctc_loss``; None if PyTorch refuses it.

    Args:
        args: The positional arguments of the call.
        kwargs: The keyword arguments of the call.
    """
    names = ("input_lengths", "target_lengths")
    lengths = [
        args[i] if len(args) > i else kwargs.get(name) for i, name in enumerate(names, start=2)
    ]
    of_one_kind = any(
        all(isinstance(value, kind) for value in lengths) for kind in (torch.Tensor, (tuple, list))
    )
    return functools.partial(_traced, *args, **kwargs) if of_one_kind else None
