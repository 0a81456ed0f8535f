"""The ops of recurrent layers, run on the device, against float64 eager PyTorch."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from popsim_torch import _native, ir
from popsim_torch.errors import InternalError
from popsim_torch.passes.native_graph import to_native

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
MODES = list(GATES)
# Largest error as a share of the largest value.
TOLERANCES = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# The same for products that may round their operands.
REDUCED = {"bf16": 2e-2, "tf32": 5e-5}
GRADIENTS = ("x", "h0", "c0", "weight_input", "weight_hidden", "bias_input", "bias_hidden")


@dataclass(frozen=True)
class Layer:
    mode: str
    steps: int = 5
    batch: int = 3
    inputs: int = 7
    hidden: int = 10
    bias: bool = True
    reverse: bool = False
    dtype: torch.dtype = torch.float32
    precision: str | None = None

    def operands(self) -> list[torch.Tensor | None]:
        """Return x, h0, c0, both weights and both biases, float64 numbers of the type."""
        state = (self.batch, self.hidden)
        columns = GATES[self.mode] * self.hidden

        def numbers(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (scale * torch.randn(shape)).to(self.dtype).double()

        return [
            numbers(self.steps, self.batch, self.inputs),
            numbers(*state),
            numbers(*state) if self.mode == "lstm" else None,
            numbers(columns, self.inputs, scale=self.inputs**-0.5),
            numbers(columns, self.hidden, scale=self.hidden**-0.5),
            numbers(columns) if self.bias else None,
            numbers(columns) if self.bias else None,
        ]


def run_eager(layer: Layer, operands) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    x, h0, c0, *weights = operands
    states = [state[None] for state in (h0, c0) if state is not None]
    weights = [weight for weight in weights if weight is not None]
    y, *finals = getattr(torch, layer.mode)(
        x.flip(0) if layer.reverse else x,
        states if layer.mode == "lstm" else states[0],
        weights,
        layer.bias,
        1,
        0.0,
        False,
        False,
        False,
    )
    finals = [state[0] for state in finals]
    return y.flip(0) if layer.reverse else y, finals[0], finals[1] if len(finals) == 2 else None


class Program:
    """The op and its backward, on tensors that keep their strides."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._graph = ir.Graph()
        self._values: list[tuple[ir.Tensor, torch.Tensor]] = []
        self._attributes = {"mode": layer.mode, "reverse": layer.reverse}
        if layer.precision is not None:
            self._attributes["precision"] = layer.precision

    def input(self, value: torch.Tensor | None) -> ir.Tensor | None:
        if value is None:
            return None
        value = value if value.dtype == self._layer.dtype else value.to(self._layer.dtype)
        count = value.untyped_storage().nbytes() // value.element_size()
        base = self._graph.add_tensor(ir.TensorKind.VARIABLE, value.dtype, (count,))
        self._values.append((base, value.as_strided((count,), (1,), 0)))
        return self._graph.add_view(base, value.shape, value.stride(), value.storage_offset())

    def output(self, *shape: int) -> ir.Tensor:
        return self._graph.add_tensor(ir.TensorKind.VARIABLE, self._layer.dtype, shape)

    def forward(self, operands, *, keep: bool = True) -> list[ir.Tensor | None]:
        layer = self._layer
        sequence = (layer.steps, layer.batch)
        y = self.output(*sequence, layer.hidden)
        gates = state = None
        if keep and GATES[layer.mode] > 1:
            gates = self.output(*sequence, GATES[layer.mode] * layer.hidden)
            state = self.output(*sequence, layer.hidden)
        self._add("recurrent", operands, [y, gates, state])
        return [y, gates, state]

    def backward(self, gradients, operands, results, wanted) -> list[ir.Tensor | None]:
        outputs = [
            self.output(*operand.shape) if operand is not None and name in wanted else None
            for name, operand in zip(GRADIENTS, operands, strict=True)
        ]
        self._add("recurrent_grad", [*gradients, *operands[:5], *results], outputs)
        return outputs

    def _add(self, kind: str, inputs, outputs) -> None:
        self._graph.add_op(
            kind, inputs, outputs, self._attributes, phase=ir.Phase.FORWARD, name=kind
        )

    def run(self, tensors) -> list[torch.Tensor | None]:
        config = _native.RunConfig(1, 1, False, "sequential")
        with _native.translated_errors():
            executable = _native.Executable(to_native(self._graph), config)
            executable.load()
            for base, memory in self._values:
                executable.write(base.id, memory)
            executable.run([])
        return [None if tensor is None else executable.read(tensor.id) for tensor in tensors]


def assert_near(
    actual: torch.Tensor, expected: torch.Tensor, what: str, precision: str | None = None
) -> None:
    scale = max(expected.abs().max().item(), 0.05)
    torch.testing.assert_close(
        actual.double(),
        expected.detach(),
        rtol=0,
        atol=REDUCED.get(precision, TOLERANCES[actual.dtype]) * scale,
        msg=lambda text: f"{what}: {text}",
    )


def assert_layer(layer: Layer, wanted=GRADIENTS, given=("y", "h", "c"), strided=False) -> None:
    """Compare y and all gradients that are asked for, with those that come in."""
    torch.manual_seed(0)
    operands = layer.operands()
    leaves = [None if o is None else o.requires_grad_() for o in operands]
    results = dict(zip("yhc", run_eager(layer, leaves), strict=True))
    incoming = {
        name: torch.randn(result.shape).to(layer.dtype).double()
        for name, result in results.items()
        if name in given and result is not None
    }
    asked = [leaf for leaf in leaves if leaf is not None]
    found = torch.autograd.grad(
        [results[name] for name in incoming], asked, list(incoming.values()), allow_unused=True
    )
    expected = dict(
        zip(
            [n for n, o in zip(GRADIENTS, leaves, strict=True) if o is not None], found, strict=True
        )
    )

    def laid_out(value: torch.Tensor | None) -> torch.Tensor | None:
        value = None if value is None else value.detach().to(layer.dtype)
        if value is None or not strided:
            return value
        return value.mT.contiguous().mT if value.dim() > 1 else value.repeat_interleave(2)[::2]

    program = Program(layer)
    inputs = [program.input(laid_out(operand)) for operand in operands]
    outputs = program.forward(inputs)
    gradients = [program.input(laid_out(incoming.get(name))) for name in "yhc"]
    grads = program.backward(gradients, inputs, outputs, wanted)
    y, *values = program.run([outputs[0], *grads])
    assert_near(y, results["y"], "y", layer.precision)
    for name, value in zip(GRADIENTS, values, strict=True):
        assert (value is None) == (name not in wanted or name not in expected)
        if value is not None:
            assert_near(value, expected[name], name, layer.precision)


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_layer(mode, reverse, dtype):
    assert_layer(Layer(mode, reverse=reverse, dtype=dtype))


# Less than a vector of units, whole vectors, whole panels and a bit, rows in several groups.
SIZES = [
    (1, 1, 1, 1),
    (1, 5, 3, 16),
    (3, 1, 4, 17),
    (2, 2, 5, 64),
    (4, 7, 33, 65),
    (2, 50, 2, 130),
    (40, 13, 8, 24),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_sizes(mode, size):
    steps, batch, inputs, hidden = size
    assert_layer(Layer(mode, steps, batch, inputs, hidden))
    assert_layer(Layer(mode, steps, batch, inputs, hidden, bias=False, reverse=True))


@pytest.mark.parametrize("mode", MODES)
def test_strided_operands(mode):
    assert_layer(Layer(mode), strided=True)


@pytest.mark.parametrize("wanted", GRADIENTS)
@pytest.mark.parametrize("mode", MODES)
def test_one_gradient_alone(mode, wanted):
    assert_layer(Layer(mode), wanted=(wanted,))


@pytest.mark.parametrize("given", ["y", "h", "c", "yc"])
def test_some_incoming_gradients(given):
    assert_layer(Layer("lstm"), given=tuple(given))
    assert_layer(Layer("lstm", reverse=True), given=tuple(given))


@pytest.mark.parametrize("mode", MODES)
def test_incoming_gradient_of_the_last_state_alone(mode):
    assert_layer(Layer(mode), given=("h",))


@pytest.mark.parametrize("mode", MODES)
def test_nothing_kept_for_backward_changes_no_bit(mode):
    layer = Layer(mode)
    operands = layer.operands()
    sequences = []
    for keep in (True, False):
        program = Program(layer)
        outputs = program.forward([program.input(o) for o in operands], keep=keep)
        sequences += program.run(outputs[:1])
    assert torch.equal(*sequences)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# Work enough for both ways to share it: rows of the batch, units of every step.
@pytest.mark.parametrize("size", [(6, 16, 48, 96), (3, 3, 16, 400)], ids=str)
@pytest.mark.parametrize("mode", ["lstm", "gru"])
def test_threads_change_no_bit_of_the_recurrence(mode, size, threads):
    steps, batch, inputs, hidden = size
    layer = Layer(mode, steps, batch, inputs, hidden)
    torch.manual_seed(0)
    operands = layer.operands()
    # Without a part from the input, whose product may be another one's.
    operands[0].zero_()
    incoming = torch.randn(steps, batch, hidden)
    results = []
    for count in (1, 2, 3):
        threads(count)
        program = Program(layer)
        inputs_ = [program.input(operand) for operand in operands]
        outputs = program.forward(inputs_)
        gradients = [program.input(incoming), None, None]
        grads = program.backward(gradients, inputs_, outputs, ("h0", "bias_input"))
        results.append(program.run([outputs[0], grads[1], grads[5]]))
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("mode", MODES)
def test_saturated_and_special_values(mode):
    layer = Layer(mode, steps=1, batch=8, inputs=1, hidden=2)
    values = torch.tensor([0.0, 1e-30, -1e-4, 0.6251, 30.0, -200.0, torch.inf, torch.nan])
    columns = GATES[mode] * layer.hidden
    state = torch.zeros(8, 2)
    operands = [
        values.double().reshape(1, 8, 1),
        state.double(),
        state.double() if mode == "lstm" else None,
        torch.ones(columns, 1).double(),
        torch.ones(columns, 2).double(),
        None,
        None,
    ]
    program = Program(Layer(mode, 1, 8, 1, 2, bias=False))
    outputs = program.forward([program.input(operand) for operand in operands])
    (y,) = program.run(outputs[:1])
    expected = run_eager(Layer(mode, 1, 8, 1, 2, bias=False), operands)[0]
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-7, equal_nan=True)


def test_small_values_keep_their_relative_precision():
    x = torch.logspace(-12, 1.2, 4000)
    layer = Layer("rnn_tanh", 1, 4000, 1, 1, bias=False)
    program = Program(layer)
    one = torch.ones(1, 1)
    operands = [x.reshape(1, -1, 1), torch.zeros(4000, 1), None, one, one, None, None]
    outputs = program.forward([program.input(operand) for operand in operands])
    (y,) = program.run(outputs[:1])
    torch.testing.assert_close(y.flatten().double(), x.double().tanh(), rtol=2.5e-7, atol=0)


def test_weights_that_do_not_fit_are_refused():
    layer = Layer("lstm")
    operands = layer.operands()
    operands[4] = operands[4][:, :-1]
    program = Program(layer)
    outputs = program.forward([program.input(operand) for operand in operands])
    with pytest.raises(InternalError, match="recurrent"):
        program.run(outputs[:1])


def test_an_unknown_mode_is_refused():
    operands = Layer("rnn_tanh").operands()
    program = Program(Layer("rnn_tanh"))
    program._attributes["mode"] = "elman"
    outputs = program.forward([program.input(operand) for operand in operands])
    with pytest.raises(InternalError, match="elman"):
        program.run(outputs[:1])


def test_the_eager_reference_is_that_of_the_module():
    layer = Layer("gru", dtype=torch.float32)
    operands = [None if o is None else o.float() for o in layer.operands()]
    module = nn.GRU(layer.inputs, layer.hidden)
    with torch.no_grad():
        for parameter, value in zip(module.parameters(), operands[3:], strict=True):
            parameter.copy_(value)
        expected, final = module(operands[0], operands[1][None])
    y, h, _ = run_eager(layer, operands)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(h, final[0])
