"""LSTM, GRU and plain recurrent layers as one operator each, instead of one per step.

PyTorch expands ``torch.lstm`` and similar functions to the products and gates of every step. Here a
layer in one direction is ``popsim::recurrent``; between layers (dropout, joining directions), the
code calls PyTorch's own functions, which the function mode sees like calls of user code.
``packed`` divides a layer for a packed sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from popsim_torch.errors import Error
from popsim_torch.trace.graph.origin import user_line
from popsim_torch.trace.own_operators import define_with_gradient
from popsim_torch.trace.packed import KnownValue, blocks_of, known_sizes, run_blocks
from popsim_torch.trace.recurrent_steps import gradients_by_steps

RECURRENT_FUNCTIONS = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
"""Names of the functions of ``torch`` that run a recurrent network over a sequence."""

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""Number of gates of each kind of layer, by the name of its function."""

_SCHEMAS = (
    "recurrent(Tensor x, Tensor h0, Tensor? c0, Tensor weight_input, Tensor weight_hidden, "
    "Tensor? bias_input, Tensor? bias_hidden, str mode, bool reverse)"
    " -> (Tensor y, Tensor h, Tensor c, Tensor gates, Tensor state)",
    "recurrent_grad(Tensor? grad_y, Tensor? grad_h, Tensor? grad_c, Tensor x, Tensor h0, "
    "Tensor? c0, Tensor weight_input, Tensor weight_hidden, Tensor y, Tensor gates, Tensor state, "
    "str mode, bool reverse)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_FLOATING = (torch.float16, torch.float32)
_NUM_GRADIENTS = 7  # for x, h0, c0, both weights and both biases


def _recurrent(
    x: torch.Tensor,
    h0: torch.Tensor,
    c0: torch.Tensor | None,
    weight_input: torch.Tensor,
    weight_hidden: torch.Tensor,
    bias_input: torch.Tensor | None,
    bias_hidden: torch.Tensor | None,
    mode: str,
    reverse: bool,
) -> tuple[torch.Tensor, ...]:
    """Return empty results; results that a kind of layer does not have are of size 0."""
    steps, batch = x.shape[:2]
    hidden = weight_hidden.shape[1]
    sequence, state, nothing = (steps, batch, hidden), (batch, hidden), (0,)
    gates = nothing if GATES[mode] == 1 else (steps, batch, GATES[mode] * hidden)
    shapes: Sequence[tuple[int, ...]] = (
        sequence,
        state,
        nothing if c0 is None else state,
        gates,
        nothing if GATES[mode] == 1 else sequence,
    )
    return tuple(x.new_empty(shape) for shape in shapes)


def _recurrent_grad(
    grad_y: torch.Tensor | None,
    grad_h: torch.Tensor | None,
    grad_c: torch.Tensor | None,
    x: torch.Tensor,
    h0: torch.Tensor,
    c0: torch.Tensor | None,
    weight_input: torch.Tensor,
    weight_hidden: torch.Tensor,
    *_: object,
) -> tuple[torch.Tensor, ...]:
    bias = weight_input.shape[:1]
    cell: tuple[int, ...] = (0,) if c0 is None else h0.shape
    shapes = (x.shape, h0.shape, cell, weight_input.shape, weight_hidden.shape, bias, bias)
    return tuple(x.new_empty(shape) for shape in shapes)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, h0, c0, weight_input, weight_hidden, *biases, ctx.mode, ctx.reverse = inputs
    y, _, _, gates, state = output
    ctx.has_bias = biases[0] is not None
    ctx.has_cell = c0 is not None
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(gates, state)
    ctx.save_for_backward(x, h0, c0, weight_input, weight_hidden, y, gates, state, *biases)


def _backward(ctx: Any, grad_y: Any, grad_h: Any, grad_c: Any, *_: object) -> tuple[Any, ...]:
    gradients = (grad_y, grad_h, grad_c if ctx.has_cell else None)
    if all(gradient is None for gradient in gradients):
        return (None,) * (_NUM_GRADIENTS + 2)
    *saved, bias_input, bias_hidden = ctx.saved_tensors
    if torch.is_grad_enabled():  # another gradient follows
        inputs = (*saved[:5], bias_input, bias_hidden)
        return (*gradients_by_steps(inputs, gradients, ctx.mode, reverse=ctx.reverse), None, None)
    results: list[Any] = list(
        torch.ops.popsim.recurrent_grad(*gradients, *saved, ctx.mode, ctx.reverse)
    )
    if not ctx.has_cell:
        results[2] = None
    if not ctx.has_bias:
        results[5:7] = None, None
    return (*results, None, None)


# The operators exist as long as this object.
_library = define_with_gradient(
    "recurrent",
    _SCHEMAS,
    (_recurrent, _recurrent_grad),
    _backward,
    _keep_for_backward,
    "torch.nn.LSTM, GRU and RNN in this form. Use the cells (torch.nn.LSTMCell, GRUCell, RNNCell) "
    "in a loop over the steps.",
)

RECURRENT = torch.ops.popsim.recurrent.default
RECURRENT_GRAD = torch.ops.popsim.recurrent_grad.default


@dataclass(frozen=True)
class _Call:
    """A call of ``torch.lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu``.

    Attributes:
        sizes: The number of sequences at each step of a packed sequence; None for a padded one.
    """

    mode: str
    x: torch.Tensor
    states: tuple[torch.Tensor, ...]
    weights: list[torch.Tensor]
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool = False
    sizes: list[int] | None = None

    @property
    def num_directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def weights_per_layer(self) -> int:
        return 4 if self.has_biases else 2

    def is_covered(self) -> bool:
        """Return whether this operator supports the call; PyTorch expands other calls."""
        tensors = (self.x, *self.states, *self.weights)
        layers = self.num_layers * self.num_directions
        batch = self.x.shape[0 if self.batch_first else 1] if self.sizes is None else self.sizes[0]
        return (
            self.x.dim() == (3 if self.sizes is None else 2)
            and self.x.dtype in _FLOATING
            and all(t.dtype == self.x.dtype and t.numel() > 0 for t in tensors)
            # With proj_size there is one more weight per layer.
            and len(self.weights) == layers * self.weights_per_layer
            and all(
                state.dim() == 3
                and state.shape[0] == layers
                and state.shape[1] == batch
                and state.shape[2] == self.weights[1].shape[1]
                for state in self.states
            )
        )

    def run(self) -> tuple[torch.Tensor, ...]:
        """Return the results of the function: the last layer's sequence, then the final states."""
        x = self.x.transpose(0, 1) if self.batch_first else self.x
        finals: list[tuple[torch.Tensor, ...]] = []
        for layer in range(self.num_layers):
            if layer > 0 and self.dropout > 0 and self.train:
                x = F.dropout(x, self.dropout)
            sequences = []
            for direction in range(self.num_directions):
                sequence, final = self._run_layer(x, layer, direction)
                sequences.append(sequence)
                finals.append(final)
            x = sequences[0] if len(sequences) == 1 else torch.cat(sequences, -1)
        if self.batch_first:
            x = x.transpose(0, 1)
        return (x, *map(_stacked, zip(*finals, strict=True)))

    def _run_layer(
        self, x: torch.Tensor, layer: int, direction: int
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        index = layer * self.num_directions + direction
        start = index * self.weights_per_layer
        weights = self.weights[start : start + self.weights_per_layer]
        biases = weights[2:] if self.has_biases else [None, None]
        states = tuple(state[index] for state in self.states)

        def layer_of(
            x: torch.Tensor, states: tuple[torch.Tensor, ...]
        ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
            cell = states[1] if len(states) == 2 else None
            y, h, c, _, _ = torch.ops.popsim.recurrent(
                x, states[0], cell, *weights[:2], *biases, self.mode, direction == 1
            )
            return y, (h,) if cell is None else (h, c)

        if self.sizes is None:
            return layer_of(x, states)
        return run_blocks(x, states, blocks_of(self.sizes), layer_of, reverse=direction == 1)


def _stacked(states: Sequence[torch.Tensor]) -> torch.Tensor:
    return states[0].unsqueeze(0) if len(states) == 1 else torch.stack(tuple(states))


def _parsed(known_value: KnownValue, mode: str, args: tuple[Any, ...]) -> _Call | None:
    """Return the call with these arguments; None for one of another form."""
    if len(args) != 9:
        return None
    is_packed = not isinstance(args[3], bool)
    sizes = known_sizes(known_value, args[1]) if is_packed else None
    if is_packed and sizes is None:
        return None
    x, states, weights, *settings = (args[0], *args[2:]) if is_packed else args
    states = tuple(states) if isinstance(states, (list, tuple)) else (states,)
    if len(states) != (2 if mode == "lstm" else 1):
        return None
    call = _Call(mode, x, states, list(weights), *settings)
    return replace(call, sizes=sizes)


def recurrent_call(
    known_value: KnownValue, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], tuple[torch.Tensor, ...]] | None:
    """Return a function that computes a call with these operators; None to leave it to PyTorch.

    Args:
        known_value: Returns the values of a tensor; None if they differ from run to run.
        name: The called function's name.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        Error: This operator does not support the call, and PyTorch cannot expand it in a trace.
    """
    if name not in RECURRENT_FUNCTIONS or kwargs:
        return None
    call = _parsed(known_value, name, args)
    if call is None or not call.is_covered():
        if call is not None and call.sizes is not None:
            raise Error(
                f"A packed sequence in torch.{name}{user_line(' at ')}: weights, states and data "
                "must have one dtype (float32 or float16), and proj_size must be 0. Pass the "
                "padded sequence to the layer, and mask its outputs."
            )
        return None
    return call.run
