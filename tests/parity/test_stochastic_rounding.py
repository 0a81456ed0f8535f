"""Models whose float16 results are rounded at random."""

import math

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.ops.num_threads import threads
from tests.options import make_options
from tests.parity.models import CASES

SIGMAS = 5.0


def rounding(options: poptorch.Options, on: bool = True) -> poptorch.Options:
    options.Precision.enableStochasticRounding(on)
    return options


class Applied(nn.Module):
    def __init__(self, function):
        super().__init__()
        self._function = function

    def forward(self, *args):
        return self._function(*args)


def inference(function, *args, seed=1, on=True):
    model = poptorch.inferenceModel(Applied(function), rounding(make_options(seed=seed), on))
    return model(*args)


def bits_of(results):
    return [value.flatten().view(torch.uint8) for value in results]


def trained(name, kind=poptorch.optim.AdamW, *, options=None, seed=5, **settings):
    """Return losses and weights of two calls of a float16 model."""
    case = CASES[name]
    torch.manual_seed(0)
    module = case.make().half()
    options = options or rounding(make_options(1, 2, seed=seed))
    optimizer = kind(module.parameters(), lr=0.01, **settings)
    model = poptorch.trainingModel(module, options, optimizer)
    torch.manual_seed(1)
    inputs = [x.half() if x.is_floating_point() else x for x in case.inputs(8)]
    losses = [model(*inputs)[-1] for _ in range(2)]
    return [*losses, *(value.clone() for value in module.state_dict().values())], model


def are_equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(bits_of(one), bits_of(other), strict=True))


OPERATORS = {
    "add": lambda x: x + 2.0**-12,
    "matmul": lambda x: x[:, None] @ torch.full((1, 1), 1 + 2.0**-10).half(),
    "sum": lambda x: torch.stack([x, torch.full_like(x, 2.0**-12)]).sum(0),
    "cast": lambda x: (x.double() + 2.0**-12).to(x.dtype),
    "cumsum": lambda x: torch.stack([x, torch.full_like(x, 2.0**-12)]).cumsum(0)[1],
    "long tail": lambda x: torch.hypot(x, x),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_results_are_right_on_average(name):
    function = OPERATORS[name]
    x = torch.full((20_000,), 1 + 2.0**-10).half()
    results = inference(function, x).double().flatten()
    expected = function(x[:1].double()).double() if name != "matmul" else x[:1].double() ** 2
    exact = expected.flatten()[0].item()
    step = 2.0**-10
    low = math.floor(exact / step) * step
    assert set(results.unique().tolist()) == {low, low + step}
    chance = (exact - low) / step
    deviation = step * math.sqrt(chance * (1 - chance) / len(results))
    assert abs(results.mean().item() - exact) < SIGMAS * deviation + 1e-7
    assert len(inference(function, x, on=False).unique()) == 1


def test_what_moves_numbers_changes_none():
    def function(x):
        x = torch.cat([x, x.flip(0)]).view(2, 2, -1).transpose(1, 2)
        return nn.functional.max_pool1d(x.contiguous(), 2)

    x = torch.randn(64).half()
    assert torch.equal(inference(function, x), function(x))


def test_float32_models_are_not_concerned():
    def program(on):
        module = CASES["mlp"].make()
        optimizer = poptorch.optim.AdamW(module.parameters(), lr=0.01)
        model = poptorch.trainingModel(module, rounding(make_options(), on), optimizer)
        model.compile(*CASES["mlp"].inputs(4))
        return model.program()

    assert program(True) == program(False)


@pytest.mark.parametrize("name", CASES)
def test_models_train_close_to_the_nearest(name, monkeypatch):
    monkeypatch.setenv("POPSIM_VERIFY_PASSES", "1")
    kind = poptorch.optim.SGD
    results, model = trained(name, kind)
    nearest, plain = trained(name, kind, options=make_options(1, 2, seed=5))
    assert "stochastic_round" in model.program()
    assert "stochastic_round" not in plain.program()
    assert not are_equal(results, nearest)
    for ours, other in zip(results, nearest, strict=True):
        torch.testing.assert_close(ours, other, rtol=2e-2, atol=5e-3)


def test_the_same_seed_gives_the_same_bits():
    results = trained("cnn")[0]
    assert are_equal(results, trained("cnn")[0])
    assert not are_equal(results, trained("cnn", seed=6)[0])


def test_threads_change_no_bit():
    with threads(3):
        several = trained("transformer")[0]
    with threads(1):
        assert are_equal(several, trained("transformer")[0])


class Staged(nn.Module):
    def __init__(self, ipu=0, prints=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
        self._ipu, self._prints = ipu, prints
        self.half()

    def forward(self, x, y):
        poptorch.Block.start(ipu_id=0)
        hidden = torch.tanh(self.first(x))
        if self._prints:
            hidden = poptorch.ipu_print_tensor(hidden)
        poptorch.Block.start(ipu_id=self._ipu)
        out = self.second(hidden).sigmoid()
        return out, poptorch.identity_loss((out - y).square(), "mean")


def staged(prepare=lambda options: None, **settings):
    options = rounding(make_options(1, 4, seed=3))
    prepare(options)
    module = Staged(**settings)
    optimizer = poptorch.optim.SGD(module.parameters(), lr=0.5)
    model = poptorch.trainingModel(module, options, optimizer)
    torch.manual_seed(1)
    x, y = torch.randn(8, 4).half(), torch.randn(8, 3).half()
    results = [out for _ in range(2) for out in model(x, y)]
    return results + [value.clone() for value in module.state_dict().values()]


def anchor(options):
    for name in ("Gradient___first.weight", "Tanh:0", "Accum___second.bias"):
        options.anchorTensor(name, name, poptorch.OutputMode.All)


def rebuild(options):
    options._Popart.set("autoRecomputation", 4)


VARIATIONS = {
    "stages": {"ipu": 1},
    "anchors": {"prepare": anchor},
    "recomputation": {"prepare": rebuild},
    "prints": {"prints": True},
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_what_changes_no_value_changes_no_bit(name):
    assert are_equal(staged(), staged(**VARIATIONS[name]))


class Still(nn.Module):
    """Its weight's gradient is 1."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(20_000, dtype=torch.float16))

    def forward(self):
        return poptorch.identity_loss(self.weight, "sum")


# Each moves the weight by 2^-13 in a step, an eighth of what float16 can say there.
OPTIMIZERS = {
    "sgd": lambda p: poptorch.optim.SGD(p, lr=2.0**-13),
    "momentum": lambda p: poptorch.optim.SGD(
        p, lr=2.0**-12, momentum=0.5, dampening=0.5, use_combined_accum=False
    ),
    "combined": lambda p: poptorch.optim.SGD(
        p, lr=2.0**-12, momentum=0.5, dampening=0.5, use_combined_accum=True
    ),
    "adam": lambda p: poptorch.optim.Adam(p, lr=2.0**-13),
    "rmsprop": lambda p: poptorch.optim.RMSprop(p, lr=2.0**-13, alpha=0.0),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_too_small_for_float16_count_on_average(name):
    means = {}
    for on in (True, False):
        module = Still()
        optimizer = OPTIMIZERS[name](module.parameters())
        options = rounding(make_options(seed=3), on)
        poptorch.trainingModel(module, options, optimizer)()
        means[on] = module.weight.detach().double().mean().item()
    assert means[False] == 1
    # Below 1 the numbers are 2^-11 apart: a quarter of the weights moves.
    deviation = 2.0**-11 * math.sqrt(0.25 * 0.75 / 20_000)
    assert abs(means[True] - (1 - 2.0**-13)) < SIGMAS * deviation


def test_accumulators_too_coarse_for_small_gradients_count_on_average():
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(20_000))

        def forward(self, scale):
            return poptorch.identity_loss(self.weight * scale, "sum")

    options = rounding(make_options(1, 2, seed=3))
    options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    module = Small()
    optimizer = poptorch.optim.SGD(
        module.parameters(), lr=1.0, accum_type=torch.float16, use_combined_accum=False
    )
    poptorch.trainingModel(module, options, optimizer)(torch.tensor([1.0, 2.0**-12]))
    moved = -module.weight.detach().double()
    assert set(moved.unique().tolist()) == {1.0, 1 + 2.0**-10}
    deviation = 2.0**-10 * math.sqrt(0.25 * 0.75 / 20_000)
    assert abs(moved.mean().item() - (1 + 2.0**-12)) < SIGMAS * deviation
