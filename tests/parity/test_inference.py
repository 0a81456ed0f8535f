"""Inference against eager PyTorch: modes, shared weights, structures, random numbers."""

import copy
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import popsim_torch as poptorch
from popsim_torch.enums import OutputMode
from tests.parity.compare import assert_close, quiet_options
from tests.parity.models import CASES
from tests.parity.tolerances import ONE_PASS

FLOAT = ONE_PASS[torch.float32]


def warm_up(model: nn.Module, case) -> None:
    """Give BatchNorm statistics that are not those of a new model."""
    with torch.no_grad():
        for _ in range(3):
            model(*case.inputs(8))


def infer(model: nn.Module, *args, iterations: int = 1, **kwargs):
    options = quiet_options()
    options.deviceIterations(iterations)
    return poptorch.inferenceModel(model, options)(*args, **kwargs)


def eager(model: nn.Module, inputs, micro_batches: int):
    """Return the outputs and losses of all micro-batches, stacked as the device does."""
    with torch.no_grad():
        parts = zip(*(x.chunk(micro_batches) for x in inputs), strict=True)
        calls = [model(*part) for part in parts]
    outputs, losses = zip(*calls, strict=True)
    return torch.cat(outputs), torch.stack(losses) if micro_batches > 1 else losses[0]


@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_eval_mode(case, dtype, iterations):
    model = case.make()
    warm_up(model, case)
    model.to(dtype).eval()
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in case.inputs(4 * iterations)]
    output, loss = infer(model, *inputs, iterations=iterations)
    expected, expected_loss = eager(model, inputs, iterations)
    assert_close(output, expected, ONE_PASS[dtype])
    assert_close(loss, expected_loss, ONE_PASS[dtype])


@pytest.mark.parametrize("name", ["cnn", "resnet"])
def test_batch_norm_in_train_mode_counts_but_keeps_its_statistics_on_the_device(name):
    case = CASES[name]
    model = case.make().train()
    warm_up(model, case)
    twin = copy.deepcopy(model)
    before = {n: b.clone() for n, b in model.named_buffers()}
    options = quiet_options()
    options.deviceIterations(3)
    device = poptorch.inferenceModel(model, options)
    for _ in range(2):
        inputs = case.inputs(12)
        output, _ = device(*inputs)
        assert_close(output, eager(twin, inputs, 3)[0], FLOAT)
    for buffer_name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[buffer_name])
    device.copyWeightsToHost()
    for (buffer_name, buffer), expected in zip(model.named_buffers(), twin.buffers(), strict=True):
        if buffer.is_floating_point():
            assert_close(buffer, expected, FLOAT, buffer_name)


# --- Training and inference of the same model ------------------------------------------------


@pytest.mark.parametrize("first", ["training", "inference"])
def test_trained_weights_reach_the_inference_wrapper(first):
    case = CASES["cnn"]
    model = case.make()
    options = quiet_options()
    if first == "inference":
        model.eval()
        inference = poptorch.inferenceModel(model, options)
        inference(*case.inputs(4))
        model.train()
    training = poptorch.trainingModel(
        model, quiet_options(), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    for step in range(3):
        training(*case.inputs(4))
        if step == 0 and first == "training":
            model.eval()
            inference = poptorch.inferenceModel(model, options)
        inputs = case.inputs(4)
        output, _ = inference(*inputs)
        twin = case.make().eval()
        twin.load_state_dict(model.state_dict())
        assert_close(output, eager(twin, inputs, 1)[0], FLOAT)


def test_inference_wrapper_of_a_training_wrapper():
    case = CASES["mlp"]
    model = case.make()
    training = poptorch.trainingModel(model, quiet_options())
    inference = poptorch.inferenceModel(training, quiet_options())
    inputs = case.inputs(4)
    before, _ = inference(*inputs)
    for _ in range(5):
        training(*case.inputs(4))
    after, _ = inference(*inputs)
    assert not torch.equal(before, after)
    twin = case.make()
    twin.load_state_dict(model.state_dict())
    assert_close(after, twin(*inputs)[0], FLOAT)


def test_changes_on_the_host_need_copy_weights_to_device():
    case = CASES["mlp"]
    model = case.make()
    device = poptorch.inferenceModel(model, quiet_options())
    inputs = case.inputs(4)
    before, _ = device(*inputs)
    with torch.no_grad():
        model.layers[0].weight.mul_(2)
    unchanged, _ = device(*inputs)
    assert torch.equal(unchanged, before)
    device.copyWeightsToDevice()
    after, _ = device(*inputs)
    assert_close(after, model(*inputs)[0], FLOAT)


def test_load_state_dict_of_the_wrapper_reaches_the_device():
    case = CASES["resnet"]
    model, other = case.make().eval(), case.make().eval()
    device = poptorch.inferenceModel(model, quiet_options())
    inputs = case.inputs(4)
    device(*inputs)
    device.load_state_dict(other.state_dict())
    output, _ = device(*inputs)
    assert_close(output, other(*inputs)[0], FLOAT)


class TiedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words, labels):
        output = self.head(torch.tanh(self.words(words)))
        return output, F.cross_entropy(output, labels)


def test_tied_weights_stay_one_tensor():
    model = TiedModel()
    twin = copy.deepcopy(model)
    options = quiet_options()
    options.anchorTensor("gradient", "Gradient___words.weight")
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.5))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    for _ in range(5):
        inputs = torch.randint(0, 7, (6,)), torch.randint(0, 7, (6,))
        output, _ = training(*inputs)
        optimizer.zero_grad()
        expected, loss = twin(*inputs)
        loss.backward()
        assert_close(output, expected, FLOAT)
        assert_close(training.getAnchoredTensor("gradient"), twin.words.weight.grad, FLOAT)
        optimizer.step()
    assert model.head.weight is model.words.weight
    assert_close(model.head.weight, twin.head.weight, FLOAT)
    assert "head.weight" not in training.getTensorNames()


# --- Buffers ---------------------------------------------------------------------------------


class Memory(nn.Module):
    """Buffers that are exchanged, changed in part, and read before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.randn(6))
        self.register_buffer("b", torch.randn(6))

    def forward(self, x):
        before = self.a.clone(), self.a.view(2, 3), self.b[1:]
        kept = self.a.clone()
        self.a.copy_(self.b)
        self.b.copy_(kept)
        self.a[1:3].add_(x.sum())
        self.b[0] = self.a[1]
        return before[0], before[1] * 1, before[2].clone(), self.a + x, self.b.sum()


@pytest.mark.parametrize("iterations", [1, 3])
def test_buffers_that_forward_changes(iterations):
    model = Memory()
    twin = copy.deepcopy(model)
    options = quiet_options()
    options.deviceIterations(iterations)
    device = poptorch.inferenceModel(model, options)
    for _ in range(2):
        x = torch.randn(iterations, 6)
        results = device(x)
        expected = [[t.clone() for t in twin(part)] for part in x.split(1)]
        for i, result in enumerate(results):
            values = [call[i] for call in expected]
            wanted = torch.cat(values) if values[0].dim() else torch.stack(values)
            assert_close(result, wanted.reshape(result.shape), FLOAT, f"result {i}")
    device.copyWeightsToHost()
    assert_close(model.a, twin.a, FLOAT)
    assert_close(model.b, twin.b, FLOAT)


def test_a_buffer_returned_before_training_changes_it():
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6))
            self.register_buffer("steps", torch.zeros(1))

        def forward(self, x):
            before = self.steps.clone()
            self.steps += 1
            y = x * self.weight
            return before, self.weight.view(2, 3).t(), poptorch.identity_loss(y * y, "mean")

    model = Counter()
    options = quiet_options()
    device = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.5))
    for step in range(3):
        weight = model.weight.detach().clone()
        before, seen, _ = device(torch.randn(2, 6))
        assert before.item() == step
        assert torch.equal(seen, weight.view(2, 3).t())
    assert not torch.equal(model.weight, weight)


def test_inputs_changed_in_place_change_for_the_caller():
    class Doubling(nn.Module):
        def forward(self, x, y):
            x.mul_(2)
            y[0].add_(1)
            return x + y

    x, y = torch.randn(3, 2), torch.randn(3, 2)
    expected_x, expected_y = x * 2, y + torch.tensor([[1.0], [0.0], [0.0]])
    assert_close(infer(Doubling(), x, y), expected_x + expected_y, FLOAT)
    assert_close(x, expected_x, FLOAT)
    assert_close(y, expected_y, FLOAT)


# --- Inputs and outputs ----------------------------------------------------------------------

Point = namedtuple("Point", ["x", "y"])


class Nested(nn.Module):
    def forward(self, table, pair, *more, scale=None, **named):
        return {
            "sum": table["x"] + pair[0],
            "list": [pair[1], (more[0] * 2, None)],
            "point": Point(named["z"] * scale, table["y"].sum()),
            "constant": 3,
            "text": "abc",
        }


def test_nested_inputs_and_outputs():
    x, y, z, first, second, more, scale = torch.randn(7, 4, 3)
    result = infer(
        Nested(), {"x": x, "y": y}, (first, second), more, iterations=2, scale=scale, z=z
    )
    assert_close(result["sum"], x + first, FLOAT)
    assert isinstance(result["list"], list) and isinstance(result["list"][1], tuple)
    assert_close(result["list"][0], second, FLOAT)
    assert_close(result["list"][1][0], more * 2, FLOAT)
    assert result["list"][1][1] is None
    assert type(result["point"]) is Point
    assert_close(result["point"].x, z * scale, FLOAT)
    assert_close(result["point"].y, torch.stack([y[:2].sum(), y[2:].sum()]), FLOAT)
    assert (result["constant"], result["text"]) == (3, "abc")


def test_the_same_tensor_and_its_views_as_several_outputs():
    class Views(nn.Module):
        def forward(self, x):
            y = x.sin()
            return y, y, y.t(), y[0], y.view(-1), y.expand(2, *y.shape), x, x.t()

    x = torch.randn(3, 4)
    y = x.sin()
    expected = [y, y, y.t(), y[0], y.view(-1), y.expand(2, 3, 4), x, x.t()]
    for ours, wanted in zip(infer(Views(), x), expected, strict=True):
        assert_close(ours, wanted, FLOAT)


def test_default_tensors_are_inputs():
    default = torch.arange(4.0)[:, None]

    class Scaled(nn.Module):
        def forward(self, x, scale=default, power=2):
            return x * scale**power

    x = torch.randn(4, 2)
    assert_close(infer(Scaled(), x, iterations=2), x * default**2, FLOAT)


INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_integers(dtype):
    class Arithmetic(nn.Module):
        def forward(self, i):
            return i + 1, i * i, i // 3, i % 3, -i.to(torch.int32), i > 2, i.float() / 2, i & 3

    i = torch.arange(6).to(dtype)
    for ours, expected in zip(infer(Arithmetic(), i), Arithmetic()(i), strict=True):
        assert ours.dtype == (torch.int32 if expected.dtype == torch.int64 else expected.dtype)
        assert torch.equal(ours, expected.to(ours.dtype))


def test_other_types_are_narrowed():
    class Same(nn.Module):
        def forward(self, *tensors):
            return tuple(~t if t.dtype == torch.bool else t * 1 for t in tensors)

    given = [torch.float64, torch.bfloat16, torch.float16, torch.bool]
    results = infer(Same(), *(torch.ones(2).to(dtype) for dtype in given))
    wanted = [torch.float32, torch.float32, torch.float16, torch.bool]
    assert [result.dtype for result in results] == wanted


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_integer_labels_and_indices(dtype):
    class Picker(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(7, 5))

        def forward(self, i, labels):
            rows = F.embedding(i, self.table)
            picked = self.table[i], rows.gather(1, labels[:, None])
            return rows, *picked, F.cross_entropy(rows, labels)

    model = Picker()
    twin = copy.deepcopy(model)
    training = poptorch.trainingModel(
        model, quiet_options(), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    i, labels = torch.randint(0, 7, (6,)), torch.randint(0, 5, (6,))
    for ours, expected in zip(
        training(i.to(dtype), labels.to(dtype)), twin(i, labels), strict=True
    ):
        assert_close(ours, expected, FLOAT)


def test_zero_dimensional_inputs_and_outputs():
    class Scaled(nn.Module):
        def forward(self, x, scale):
            return x * scale, x.sum(), x.sum() > 0

    product, total, positive = infer(Scaled(), torch.ones(2, 2), torch.tensor(3.0))
    assert torch.equal(product, torch.full((2, 2), 3.0))
    assert total.shape == () and total == 4
    assert positive.dtype == torch.bool and positive


# --- Random numbers --------------------------------------------------------------------------


class Dropping(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(100))
        self.dropout = nn.Dropout(p)

    def forward(self, x):
        output = self.dropout(x * self.weight)
        return output, poptorch.identity_loss(output, "sum")


def dropped(
    seed: int, calls: int = 1, iterations: int = 1, p: float = 0.3, module: type = Dropping
) -> torch.Tensor:
    """Return what training gives for ones, of all calls and iterations."""
    model = module(p)
    options = quiet_options(seed)
    options.deviceIterations(iterations).outputMode(OutputMode.All)
    device = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.0))
    ones = torch.ones(iterations * 60, 100)
    return torch.cat([device(ones)[0] for _ in range(calls)])


def test_a_seed_gives_the_same_numbers_again():
    assert torch.equal(dropped(1, calls=3), dropped(1, calls=3))
    assert not torch.equal(dropped(1), dropped(2))


def test_micro_batches_and_calls_differ_but_not_their_split():
    calls = dropped(1, calls=3)
    first, second, third = calls.split(60)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    assert torch.equal(calls, dropped(1, iterations=3))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_statistics_of_dropout(p):
    output = dropped(3, calls=2, p=p)
    zeros = (output == 0).float()
    # Six standard deviations of the mean of 12000 draws.
    assert zeros.mean().item() == pytest.approx(p, abs=6 * (p * (1 - p) / 12000) ** 0.5)
    assert output[output != 0].unique().tolist() == pytest.approx([1 / (1 - p)])
    # No row and no column is special.
    for dim in (0, 1):
        assert zeros.mean(dim).std() < 2 * (p * (1 - p) / 60) ** 0.5


def test_dropout_drops_the_same_in_backward():
    model = Dropping(0.4)
    options = quiet_options(5)
    options.anchorTensor("gradient", "Gradient___weight")
    device = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.0))
    output, _ = device(torch.ones(1, 100))
    assert torch.equal(device.getAnchoredTensor("gradient"), output[0])


def test_two_dropouts_draw_different_numbers():
    class Two(Dropping):
        def forward(self, x):
            output = torch.cat([self.dropout(x * self.weight), self.dropout(x * self.weight)])
            return output, poptorch.identity_loss(output, "sum")

    first, second = dropped(1, module=Two).chunk(2)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_the_identity_in_inference(training):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)
            self.rnn = nn.LSTM(4, 4, num_layers=2, dropout=0.5)
            self.attention = nn.MultiheadAttention(4, 2, dropout=0.5)

        def forward(self, x):
            y = self.rnn(self.dropout(F.dropout2d(x[None], 0.5)[0]))[0]
            y = F.scaled_dot_product_attention(y, y, y, dropout_p=0.5)
            return self.attention(y, y, y, need_weights=False)[0]

    model = Net().train(training)
    x = torch.randn(5, 3, 4)
    output = infer(model, x)
    model.eval()
    y = model.rnn(x)[0]
    y = F.scaled_dot_product_attention(y, y, y)
    assert_close(output, model.attention(y, y, y, need_weights=False)[0], FLOAT)


def test_random_state_can_be_set_back():
    model = Dropping(0.5)
    device = poptorch.trainingModel(
        model, quiet_options(1), torch.optim.SGD(model.parameters(), lr=0.0)
    )
    ones = torch.ones(60, 100)
    device(ones)
    state = device.rng_state
    first, _ = device(ones)
    device.rng_state = state
    again, _ = device(ones)
    assert torch.equal(first, again)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (torch.addmv, [(300,), (300, 200), (200,)]),
        (torch.addmm, [(30, 50), (30, 40), (40, 50)]),
        (torch.addbmm, [(30, 50), (2, 30, 40), (2, 40, 50)]),
        (torch.baddbmm, [(2, 300, 50), (2, 300, 400), (2, 400, 50)]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_factor_of_zero_drops_what_it_multiplies(function, shapes):
    class Sum(nn.Module):
        def forward(self, c, a, b):
            nothing = torch.full_like(c, torch.nan)
            return (
                function(c, a * torch.nan, b, alpha=0),
                function(c, a, b * torch.nan, alpha=0, beta=0.5),
                function(nothing, a, b, beta=0),
                function(nothing, a, b * torch.nan, alpha=0, beta=0),
            )

    model, inputs = Sum(), [torch.randn(shape) for shape in shapes]
    for ours, expected in zip(infer(model, *inputs), model(*inputs), strict=True):
        assert not expected.isnan().any()
        assert_close(ours, expected, FLOAT)
