"""Recurrent layers step by step, in PyTorch's operators, for a gradient that is differentiated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

__all__ = ["gradients_by_steps"]

_Inputs = Sequence[torch.Tensor | None]
_ACTIVATIONS = {"rnn_tanh": torch.tanh, "rnn_relu": torch.relu}


def gradients_by_steps(
    inputs: _Inputs, gradients: _Inputs, mode: str, *, reverse: bool
) -> list[torch.Tensor | None]:
    """Return the gradients of a layer in one direction, which can be differentiated again.

    Args:
        inputs: Its input, initial states (the second one may be None), weights, and biases or None.
        gradients: The gradients of the sequence and of the final states; some may be None.
        mode: The kind of layer: the name of its function.
        reverse: Whether it begins with the last step.
    """
    # (Views, because one input may be computed from another one.)
    own = [None if one is None else one.view_as(one) for one in inputs]
    results = _run(own, mode, reverse=reverse)
    pairs = [
        (result, gradient)
        for result, gradient in zip(results, gradients, strict=True)
        if result is not None and gradient is not None
    ]
    wanted = [one for one in own if one is not None and one.requires_grad]
    found = iter(
        torch.autograd.grad(
            [result for result, _ in pairs],
            wanted,
            [gradient for _, gradient in pairs],
            create_graph=True,
            allow_unused=True,
        )
    )
    return [next(found) if one is not None and one.requires_grad else None for one in own]


def _run(
    inputs: _Inputs, mode: str, *, reverse: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the sequence and the final states of a layer."""
    x, h, c, weight_input, weight_hidden, bias_input, bias_hidden = inputs
    assert x is not None and h is not None and weight_input is not None
    assert weight_hidden is not None
    steps = F.linear(x, weight_input, bias_input).unbind(0)
    sequence: list[torch.Tensor] = []
    for own in reversed(steps) if reverse else steps:
        h, c = _step(own, F.linear(h, weight_hidden, bias_hidden), h, c, mode)
        sequence.append(h)
    return torch.stack(sequence[::-1] if reverse else sequence), h, c


def _step(
    own: torch.Tensor, last: torch.Tensor, h: torch.Tensor, c: torch.Tensor | None, mode: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the states after a step.

    Args:
        own: The product of its input.
        last: The product of the last state.
        h: The last state.
        c: The last cell state of an LSTM.
        mode: The kind of layer.
    """
    if c is not None:
        i, f, g, o = (own + last).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c
    if mode == "gru":
        own_r, own_z, own_n = own.chunk(3, -1)
        last_r, last_z, last_n = last.chunk(3, -1)
        n = torch.tanh(own_n + torch.sigmoid(own_r + last_r) * last_n)
        return n + torch.sigmoid(own_z + last_z) * (h - n), None
    return _ACTIVATIONS[mode](own + last), None
