"""Losses of classes and of sequences of labels, and their gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from popsim_torch.reference.call import Call, op

Maybe = Tensor | None


def _counts(call: Call, labels: Tensor, weights: Maybe, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the labels, 0 for ignored samples, and the weight of each sample."""
    labels = labels.reshape(-1).long()
    ignored = labels == call["ignore_index"]
    labels = labels.masked_fill(ignored, 0)
    count = torch.ones(len(labels), dtype=like.dtype) if weights is None else weights[labels]
    return labels, count.masked_fill(ignored, 0.0)


@op
def nll_loss(call: Call, x: Tensor, labels: Tensor, weights: Maybe = None) -> tuple[Tensor, Tensor]:
    """Return minus the label's element of ``[samples, classes]``, and the mean's divisor."""
    at, count = _counts(call, labels, weights, x)
    # 0 for ignored samples, even if their values are NaN or infinite.
    losses = torch.where(count == 0, 0.0, -x[torch.arange(len(at)), at] * count)
    total = count.sum()
    if call["reduction"] == "none":
        return losses.reshape(labels.shape), torch.zeros_like(total)
    return (losses.sum() / total if call["reduction"] == "mean" else losses.sum()), total


def _at_labels(call: Call, gradient: Tensor, total: Maybe, count: Tensor) -> Tensor:
    """Return each sample's gradient at its label."""
    values = -count * gradient.reshape(-1)
    if call["reduction"] == "mean":
        assert total is not None
        values = values / total
    return call.rounded(torch.where(count == 0, 0.0, values), call.dtypes[0])


@op
def nll_loss_grad(
    call: Call, gradient: Tensor, total: Maybe, labels: Tensor, weights: Maybe = None
) -> Tensor:
    """Return the gradient of ``x``."""
    at, count = _counts(call, labels, weights, gradient)
    out = gradient.new_zeros(len(at), call["classes"])
    out[torch.arange(len(at)), at] = _at_labels(call, gradient, total, count)
    return out


@op
def cross_entropy_grad(
    call: Call,
    gradient: Tensor,
    total: Maybe,
    labels: Tensor,
    weights: Maybe,
    log_softmax: Tensor,
) -> Tensor:
    """Return the gradient of the input of the log-softmax."""
    at, count = _counts(call, labels, weights, gradient)
    values = _at_labels(call, gradient, total, count)
    out = -log_softmax.exp() * values[:, None]
    out[torch.arange(len(at)), at] += values
    return out


def _ctc(
    call: Call, log_probs: Tensor, targets: Tensor, steps: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Return PyTorch's loss of each item, and its alpha."""
    found: tuple[Tensor, Tensor] = torch.ops.aten._ctc_loss(
        *(log_probs, targets.long(), steps.tolist(), lengths.tolist()),
        *(call["blank"], call["zero_infinity"]),
    )
    return found


@op
def ctc_loss(
    call: Call, log_probs: Tensor, targets: Tensor, steps: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Return minus the log-probability of the labels, summed over their alignments, and alpha.

    ``alpha`` has the shape ``[steps, items * states]``: the logarithm of the probability of each
    state given the steps so far, 0 for the most probable one; zeros if there is no such state.
    """
    losses, alpha = _ctc(call, log_probs, targets, steps, lengths)
    if call["zero_infinity"]:
        losses = losses.masked_fill(losses == torch.inf, 0.0)
    # The logarithm of zero is -1e30 here, so that sums of it are finite.
    alpha = alpha.clamp(min=-1e30)
    parts = []
    for item, (count, length) in enumerate(zip(steps.tolist(), lengths.tolist(), strict=True)):
        labels = targets.shape[1] if targets.dim() == 2 else length
        part = alpha.new_zeros(len(log_probs), 2 * labels + 1)
        states = alpha[item, :count, : 2 * length + 1]
        part[:count, : 2 * length + 1] = states - states.amax(-1, keepdim=True)
        parts.append(part)
    return losses, torch.cat(parts, 1)


@op
def ctc_loss_grad(
    call: Call,
    gradient: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    steps: Tensor,
    lengths: Tensor,
    alpha: Tensor,
) -> Tensor:
    """Return the gradient of the logits whose log-softmax is ``log_probs``.

    ``alpha`` is a result of ``ctc_loss``; this function computes it again.
    """
    losses, found = _ctc(call, log_probs, targets, steps, lengths)
    grad: Tensor = torch.ops.aten._ctc_loss_backward(
        *(gradient, log_probs, targets.long(), steps.tolist(), lengths.tolist(), losses, found),
        *(call["blank"], call["zero_infinity"]),
    )
    return grad
