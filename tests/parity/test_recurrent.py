"""LSTM, GRU and RNN modules and functions on the device against eager PyTorch."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.parity.compare import Loop, Pair, assert_close, quiet_options
from tests.parity.tolerances import ONE_PASS, TRAINED

CONSTRUCTORS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": lambda *sizes, **settings: nn.RNN(*sizes, nonlinearity="relu", **settings),
}
VARIANTS = {
    "plain": {},
    "batch_first": {"batch_first": True},
    "no_bias": {"bias": False},
    "two_directions": {"bidirectional": True, "batch_first": True},
    "three_layers": {"num_layers": 3},
    "all": {"num_layers": 2, "bidirectional": True, "bias": False, "batch_first": True},
}
FLOAT = ONE_PASS[torch.float32]


class Network(nn.Module):
    """A recurrent network and a loss of its sequence and its last states."""

    def __init__(self, mode: str, *, learn_states: bool = False, **settings) -> None:
        super().__init__()
        self.rnn = CONSTRUCTORS[mode](5, 6, **settings)
        layers = self.rnn.num_layers * (2 if self.rnn.bidirectional else 1)
        self.scale = nn.Parameter(torch.tensor([1.25]))
        self.states = None
        if learn_states:
            count = 2 if mode == "lstm" else 1
            self.states = nn.ParameterList(torch.randn(layers, 1, 6) for _ in range(count))

    def forward(self, x, target):
        states = None
        if self.states is not None:
            batch = x.shape[0 if self.rnn.batch_first else 1]
            states = tuple(state.expand(-1, batch, -1).contiguous() for state in self.states)
            states = states if len(states) == 2 else states[0]
        sequence, finals = self.rnn(x * self.scale, states)
        finals = finals if isinstance(finals, tuple) else (finals,)
        loss = (sequence.mean(2) * target[..., 0]).sum()
        loss = loss + sum((i + 1) * final.square().mean() for i, final in enumerate(finals))
        return sequence, poptorch.identity_loss(loss, "none")


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return poptorch.optim.SGD(model.parameters(), lr=0.05)


def check_training(model: nn.Module, make_inputs, dtype=torch.float32, loop=None, calls=3) -> Pair:
    pair = Pair(model.to(dtype), sgd, tolerance=TRAINED[dtype], loop=loop)
    for _ in range(calls):
        pair.step(*(tensor.to(dtype) for tensor in make_inputs()))
    pair.finish()
    return pair


def sequences(batch: int = 4, steps: int = 3):
    return torch.randn(batch, steps, 5), torch.randn(batch, steps, 1)


def kinds_of_ops(model: poptorch.PoplarExecutor) -> list[str]:
    lines = model.program(host=True).splitlines()
    return [line.split(" = ")[-1].split("(")[0].strip() for line in lines]


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("mode", CONSTRUCTORS)
def test_updates(mode, variant):
    pair = check_training(Network(mode, **variant), sequences)
    layers = pair.model.rnn.num_layers * (2 if pair.model.rnn.bidirectional else 1)
    kinds = kinds_of_ops(pair.device)
    assert kinds.count("recurrent") == kinds.count("recurrent_grad") == layers


@pytest.mark.parametrize("mode", CONSTRUCTORS)
def test_learned_first_states(mode):
    model = Network(mode, learn_states=True, num_layers=2, bidirectional=True, batch_first=True)
    check_training(model, sequences)


@pytest.mark.parametrize("mode", ["lstm", "gru", "rnn_tanh"])
def test_float16(mode):
    check_training(Network(mode, batch_first=True, num_layers=2), sequences, torch.float16)


@pytest.mark.parametrize("mode", ["lstm", "gru"])
def test_gradient_accumulation(mode):
    loop = Loop(2, 3)
    model = Network(mode, batch_first=True, bidirectional=True)
    check_training(model, lambda: sequences(2 * loop.micro_batches), loop=loop, calls=2)


@pytest.mark.parametrize("batch, steps", [(1, 1), (1, 7), (9, 1)])
@pytest.mark.parametrize("mode", CONSTRUCTORS)
def test_single_samples_and_steps(mode, batch, steps):
    check_training(Network(mode, batch_first=True), lambda: sequences(batch, steps))


def test_stages_of_a_pipeline():
    class Staged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.LSTM(5, 6, batch_first=True)
            self.second = nn.GRU(6, 4, batch_first=True)

        def forward(self, x, target):
            with poptorch.Block("a", ipu_id=0):
                x, _ = self.first(x)
            with poptorch.Block("b", ipu_id=1):
                x, _ = self.second(x)
                return x, nn.functional.mse_loss(x, target.expand_as(x))

    loop = Loop(1, 4)
    check_training(Staged(), lambda: sequences(8), loop=loop)


class Surrounded(nn.Module):
    """Buffers that change in forward, a frozen weight, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.first = nn.GRU(5, 6, batch_first=True)
        self.first.weight_hh_l0.requires_grad_(False)
        self.frozen = nn.LSTM(6, 6, batch_first=True, bidirectional=True).requires_grad_(False)
        self.last = nn.RNN(12, 4, batch_first=True)

    def forward(self, x, target):
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        x, _ = self.frozen(self.first(x)[0])
        x, _ = self.last(x)
        x = x[:, -1]
        return x, nn.functional.mse_loss(x, target[:, 0].expand_as(x))


def test_beside_changing_buffers_and_frozen_weights():
    check_training(Surrounded(), lambda: sequences(6))


def infer(module: nn.Module, *inputs):
    model = poptorch.inferenceModel(module, quiet_options())
    return model(*inputs), model


def assert_same(ours, expected) -> None:
    if isinstance(expected, tuple):
        assert len(ours) == len(expected)
        for one, other in zip(ours, expected, strict=True):
            assert_same(one, other)
    else:
        assert ours.shape == expected.shape
        assert_close(ours, expected, FLOAT)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("mode", CONSTRUCTORS)
def test_inference(mode, variant):
    module = CONSTRUCTORS[mode](5, 6, **variant)
    x = torch.randn(4, 3, 5)
    ours, model = infer(module, x)
    assert_same(ours, module(x))
    assert "recurrent" in kinds_of_ops(model)


@pytest.mark.parametrize("mode", CONSTRUCTORS)
def test_unbatched_input(mode):
    module = CONSTRUCTORS[mode](5, 6, num_layers=2)
    x = torch.randn(4, 5)
    assert_same(infer(module, x)[0], module(x))


class OneResult(nn.Module):
    def __init__(self, rnn: nn.Module, choose) -> None:
        super().__init__()
        self.rnn = rnn
        self.choose = choose

    def forward(self, x):
        return self.choose(self.rnn(x))


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(
    "choose", [lambda r: r[0], lambda r: r[1][0], lambda r: r[1][1]], ids=["sequence", "h", "c"]
)
def test_one_result_alone(choose, bidirectional):
    module = OneResult(nn.LSTM(5, 6, bidirectional=bidirectional), choose)
    x = torch.randn(4, 3, 5)
    assert_same(infer(module, x)[0], module(x))


def test_functional_call():
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(18, 5))
            self.v = nn.Parameter(torch.randn(18, 6))

        def forward(self, x, h):
            return torch.gru(x, h, [self.w, self.v], False, 1, 0.0, False, False, True)

    module = Functional()
    x, h = torch.randn(4, 3, 5), torch.randn(1, 4, 6)
    ours, model = infer(module, x, h)
    assert_same(ours, module(x, h))
    assert "recurrent" in kinds_of_ops(model)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_projected_states_are_left_to_pytorch():
    module = nn.LSTM(5, 6, proj_size=2, num_layers=2)
    x = torch.randn(4, 3, 5)
    ours, model = infer(module, x)
    assert_same(ours, module(x))
    assert "recurrent" not in kinds_of_ops(model)


def test_states_of_another_size_are_refused_as_in_eager():
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(5, 6)

        def forward(self, x):
            return self.rnn(x, torch.zeros(1, 2, 6))[0]

    with pytest.raises(RuntimeError, match="Expected hidden size"):
        infer(Wrong(), torch.randn(4, 3, 5))


def test_dropout_between_layers_drops_whole_features_at_random():
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.RNN(1, 400, num_layers=2, dropout=0.25, nonlinearity="relu")
            with torch.no_grad():
                for parameter in self.rnn.parameters():
                    parameter.zero_()
                self.rnn.weight_ih_l0.fill_(1.0)
                self.rnn.weight_ih_l1.copy_(torch.eye(400))

        def forward(self, x):
            sequence, _ = self.rnn(x)
            return sequence, poptorch.identity_loss(sequence, "sum")

    model = Dropping()
    device = poptorch.trainingModel(
        model, quiet_options(3), poptorch.optim.SGD(model.parameters(), lr=0.0)
    )
    sequence, _ = device(torch.ones(10, 2, 1))
    dropped = sequence == 0
    torch.testing.assert_close(sequence[~dropped], torch.full_like(sequence[~dropped], 4 / 3))
    assert 0.22 < dropped.float().mean() < 0.28


class Penalty(nn.Module):
    """Adds the size of a gradient to the loss."""

    def __init__(self, *, create_graph: bool) -> None:
        super().__init__()
        self.rnn = nn.LSTM(5, 6, batch_first=True)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.create_graph = create_graph

    def forward(self, x, target):
        x = x * self.scale
        y, _ = self.rnn(x)
        (gradient,) = torch.autograd.grad(
            y.sum(), x, retain_graph=True, create_graph=self.create_graph
        )
        loss = (y.mean(2) * target[..., 0]).sum() + gradient.square().sum()
        return y, poptorch.identity_loss(loss, "none")


def test_a_gradient_that_forward_takes_itself():
    check_training(Penalty(create_graph=False), sequences)


class Smooth(nn.Module):
    """Trains with a penalty for gradients of input and weights, from a state made of the input."""

    def __init__(self, kind, **options) -> None:
        super().__init__()
        self.rnn = kind(5, 6, batch_first=True, **options)
        self.start = nn.Linear(5, 6)

    def forward(self, x, target):
        x = x.detach().clone().requires_grad_()
        layers = self.rnn.num_layers * (2 if self.rnn.bidirectional else 1)
        h = torch.tanh(self.start(x[:, 0])).expand(layers, -1, -1)
        is_lstm = isinstance(self.rnn, nn.LSTM)
        y, final = self.rnn(x, (h, h * 0.5) if is_lstm else h)
        ends = sum(one.sin().sum() for one in final) if is_lstm else final.sin().sum()
        wanted = [x, self.rnn.weight_hh_l0, self.rnn.weight_ih_l0]
        first = torch.autograd.grad(y.square().sum() + ends, wanted, create_graph=True)
        loss = (y.mean(2) * target[..., 0]).sum() + 0.01 * sum(one.square().mean() for one in first)
        return y, poptorch.identity_loss(loss, "none")


SECOND = {
    "LSTM": (nn.LSTM, {}),
    "LSTM, two directions": (nn.LSTM, {"bidirectional": True, "num_layers": 2}),
    "LSTM, no bias": (nn.LSTM, {"bias": False}),
    "GRU": (nn.GRU, {}),
    "GRU, two directions": (nn.GRU, {"bidirectional": True}),
    "RNN": (nn.RNN, {}),
    "RNN, relu": (nn.RNN, {"nonlinearity": "relu"}),
}


@pytest.mark.parametrize("kind, options", SECOND.values(), ids=SECOND)
def test_the_gradient_of_a_gradient(kind, options):
    check_training(Smooth(kind, **options), sequences)


def test_the_gradient_of_a_gradient_of_a_scaled_input():
    check_training(Penalty(create_graph=True), sequences)


def test_names_of_results_and_gradients():
    model = Network("lstm", batch_first=True)
    device = poptorch.trainingModel(model, quiet_options(), sgd(model))
    device(*sequences())
    names = set(device.getTensorNames())
    weights = {f"rnn.{name}_l0" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")}
    results = {"rnn/LSTM:0", "rnn/LSTM:1", "rnn/LSTM:2", "Mul:0"}
    wanted = weights | results
    assert names >= wanted | {f"Gradient___{name}" for name in wanted}


@pytest.mark.parametrize("mode, kind", [("gru", "GRU"), ("rnn_tanh", "RNN"), ("rnn_relu", "RNN")])
def test_names_of_other_kinds(mode, kind):
    model = Network(mode, num_layers=2)
    device = poptorch.trainingModel(model, quiet_options(), sgd(model))
    device(*sequences())
    results = {f"rnn/{kind}:0", f"rnn/{kind}:0/1", f"rnn/{kind}:1", f"rnn/{kind}:1/1"}
    assert set(device.getTensorNames()) >= results | {f"Gradient___{name}" for name in results}


def test_anchored_results_and_their_gradients():
    model = Network("lstm")
    options = quiet_options()
    anchors = ("rnn/LSTM:0", "rnn/LSTM:2", "Gradient___rnn/LSTM:0", "Gradient___rnn/LSTM:2")
    for name in anchors:
        options.anchorTensor(name, name)
    device = poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0.0))
    x, target = sequences()
    device(x, target)
    sequence, (_, c) = model.rnn(x * model.scale.detach())
    expected = (
        sequence,
        c[0],
        (target / 6).expand_as(sequence),
        4 * c[0] / c.numel(),
    )
    for name, value in zip(anchors, expected, strict=True):
        assert_close(device.getAnchoredTensor(name), value, FLOAT, name)
