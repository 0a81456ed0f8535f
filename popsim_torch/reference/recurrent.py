"""Layers of LSTM, GRU and plain recurrent networks, step by step, and their gradients.

``x`` is ``[steps, batch, inputs]``; weights and the order of the gates are PyTorch's. The gradient
reads ``gates``, the values of all gates of each step, and ``state``: the cell state of an LSTM, or
the value that the reset gate of a GRU is multiplied with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from popsim_torch.reference.call import Call, op

Maybe = Tensor | None


def _order(call: Call, steps: int) -> list[int]:
    return list(range(steps))[:: -1 if call["reverse"] else 1]


def _plus(x: Tensor, bias: Maybe) -> Tensor:
    return x if bias is None else x + bias


def _cell(
    mode: str, from_x: Tensor, from_h: Tensor, h: Tensor, state: Maybe
) -> tuple[Tensor, Maybe, Maybe]:
    """Return h, the gate values and the state of a step, from the contributions of x and h."""
    if mode.startswith("rnn"):
        total = from_x + from_h
        return (total.relu() if mode == "rnn_relu" else total.tanh()), None, None
    if mode == "lstm":
        assert state is not None
        i, f, g, o = (from_x + from_h).chunk(4, -1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        state = f * state + i * g
        return o * state.tanh(), torch.cat([i, f, g, o], -1), state
    (xr, xz, xn), (hr, hz, hn) = from_x.chunk(3, -1), from_h.chunk(3, -1)
    r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
    n = (xn + r * hn).tanh()
    return n + z * (h - n), torch.cat([r, z, n], -1), hn


@op
def recurrent(
    call: Call,
    x: Tensor,
    h0: Tensor,
    c0: Maybe,
    weight_input: Tensor,
    weight_hidden: Tensor,
    bias_input: Maybe = None,
    bias_hidden: Maybe = None,
) -> tuple[Tensor, Maybe, Maybe]:
    """Return h of every step, its gates and its state."""
    kept: dict[int, tuple[Tensor, Maybe, Maybe]] = {}
    h, c = h0, c0
    for t in _order(call, x.shape[0]):
        from_x = _plus(x[t] @ weight_input.T, bias_input)
        from_h = _plus(h @ weight_hidden.T, bias_hidden)
        kept[t] = h, _, c = _cell(call["mode"], from_x, from_h, h, c)
    steps = [kept[t] for t in range(x.shape[0])]
    y, gates, states = (
        None if column[0] is None else torch.stack(column) for column in zip(*steps, strict=True)
    )
    assert y is not None
    return y, gates, states


@op
def recurrent_grad(
    call: Call,
    grad_y: Maybe,
    grad_h: Maybe,
    grad_c: Maybe,
    x: Tensor,
    h0: Tensor,
    c0: Maybe,
    weight_input: Tensor,
    weight_hidden: Tensor,
    y: Tensor,
    gates: Maybe = None,
    state: Maybe = None,
) -> list[Maybe]:
    """Return the gradients of x, h0, c0, both weights and both biases."""
    order = _order(call, x.shape[0])
    grad_h = torch.zeros_like(h0) if grad_h is None else grad_h
    carry = torch.zeros_like(h0) if grad_c is None else grad_c
    of_input, of_hidden = {}, {}
    for position, t in reversed(list(enumerate(order))):
        before = order[position - 1] if position else None
        h_before = h0 if before is None else y[before]
        grad = grad_h if grad_y is None else grad_h + grad_y[t]
        past_gates = torch.zeros_like(grad)
        if call["mode"] == "lstm":
            assert gates is not None and state is not None and c0 is not None
            c_before = c0 if before is None else state[before]
            of_input[t], carry = _lstm_grad(grad, carry, gates[t], state[t], c_before)
            of_hidden[t] = of_input[t]
        elif call["mode"] == "gru":
            assert gates is not None and state is not None
            of_input[t], of_hidden[t], past_gates = _gru_grad(grad, gates[t], state[t], h_before)
        else:
            slope = (y[t] > 0).to(y.dtype) if call["mode"] == "rnn_relu" else 1 - y[t] ** 2
            of_input[t] = of_hidden[t] = grad * slope
        grad_h = of_hidden[t] @ weight_hidden + past_gates
    columns = range(x.shape[0])
    from_x = torch.stack([of_input[t] for t in columns])
    from_h = torch.stack([of_hidden[t] for t in columns])
    before_all = torch.stack([h0, *(y[t] for t in order[:-1])])
    in_order = torch.stack([of_hidden[t] for t in order])
    return [
        from_x @ weight_input,
        grad_h,
        carry if call["mode"] == "lstm" else None,
        torch.einsum("tbg,tbi->gi", from_x, x),
        torch.einsum("tbg,tbh->gh", in_order, before_all),
        from_x.sum((0, 1)),
        from_h.sum((0, 1)),
    ]


def _lstm_grad(
    grad_h: Tensor, grad_c: Tensor, gates: Tensor, state: Tensor, state_before: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the gates' sums and of the previous cell state."""
    i, f, g, o = gates.chunk(4, -1)
    squashed = state.tanh()
    grad_c = grad_c + grad_h * o * (1 - squashed**2)
    grads = [
        grad_c * g * i * (1 - i),
        grad_c * state_before * f * (1 - f),
        grad_c * i * (1 - g**2),
        grad_h * squashed * o * (1 - o),
    ]
    return torch.cat(grads, -1), grad_c * f


def _gru_grad(
    grad_h: Tensor, gates: Tensor, state: Tensor, h_before: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the contributions of x and h, and of h outside of the gates."""
    r, z, n = gates.chunk(3, -1)
    grad_n = grad_h * (1 - z) * (1 - n**2)
    grad_r = grad_n * state * r * (1 - r)
    grad_z = grad_h * (h_before - n) * z * (1 - z)
    from_x = torch.cat([grad_r, grad_z, grad_n], -1)
    return from_x, torch.cat([grad_r, grad_z, grad_n * r], -1), grad_h * z
