"""A loss scale that the device adapts: its values over the updates, and the weights."""

import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options
from tests.parity.models import CASES

FACTOR, FINAL = "lossScaleUpdateFactor", "finalLossScale"


def automatic(d=1, ga=1, *, on=True, period=None, **settings):
    options = make_options(d, ga, seed=5)
    options.Training.setAutomaticLossScaling(on)
    if period is not None:
        settings["updatePeriod"] = period
    for name, value in settings.items():
        options._Popart.set(f"automaticLossScalingSettings.{name}", value)
    if on:
        options.anchorTensor(FINAL, FINAL, poptorch.OutputMode.All)
    return options


def factor_of(optimizer):
    return optimizer.state_dict()["ipu_state"][FACTOR].item()


class Scaled(nn.Module):
    """Its weight's gradient is what forward is given."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, dtype=dtype))

    def forward(self, slope):
        return poptorch.identity_loss(self.weight * slope, "sum")


def trainer(options, dtype=torch.float32, **settings):
    module = Scaled(dtype)
    optimizer = poptorch.optim.SGD(module.parameters(), **{"lr": 0.5, **settings})
    return poptorch.trainingModel(module, options, optimizer), optimizer


SGD = poptorch.optim.SGD
OPTIMIZERS = {
    "sgd": lambda p: SGD(p, lr=0.1, loss_scaling=4.0),
    "momentum": lambda p: SGD(
        *(p, 0.1), momentum=0.9, dampening=0.1, weight_decay=0.1, use_combined_accum=False
    ),
    "nesterov": lambda p: SGD(p, 0.1, momentum=0.9, nesterov=True, use_combined_accum=False),
    "combined": lambda p: SGD(p, 0.1, momentum=0.9, weight_decay=0.1, use_combined_accum=True),
    "combined nesterov": lambda p: SGD(
        p, 0.1, momentum=0.9, nesterov=True, use_combined_accum=True
    ),
    "adam": lambda p: poptorch.optim.Adam(p, lr=0.1),
    "adamw, clipped": lambda p: poptorch.optim.AdamW(p, lr=0.1, max_grad_norm=0.1),
    "lamb": lambda p: poptorch.optim.LAMB(p, lr=0.1),
    "rmsprop": lambda p: poptorch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "torch": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize(("name", "ga"), [("sgd", 1), ("adam", 1), *((n, 2) for n in OPTIMIZERS)])
def test_powers_of_two_change_no_bit_of_float32_weights(name, ga, monkeypatch):
    monkeypatch.setenv("POPSIM_VERIFY_PASSES", "1")
    weights = []
    for on in (True, False):
        torch.manual_seed(0)
        module = CASES["mlp"].make()
        optimizer = OPTIMIZERS[name](module.parameters())
        model = poptorch.trainingModel(module, automatic(2, ga, on=on), optimizer)
        torch.manual_seed(1)
        losses = [model(*CASES["mlp"].inputs(8 * ga))[1] for _ in range(3)]
        weights.append([*losses, *(value.clone() for value in module.state_dict().values())])
        if on:
            scale = getattr(optimizer, "loss_scaling", 1.0)
            wanted = [scale * 2.0 ** (4 + i) for i in range(2) for _ in range(ga)]
            assert model.getAnchoredTensor(FINAL).tolist() == wanted
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_the_factor_is_that_of_the_next_run():
    model, optimizer = trainer(automatic(), loss_scaling=8.0)
    model.compile(torch.ones(1))
    assert factor_of(optimizer) == 1
    for _ in range(3):
        before = factor_of(optimizer)
        model(torch.ones(1))
        assert model.getAnchoredTensor(FINAL).item() == 8 * before
        assert factor_of(optimizer) == 2 * before


def test_it_changes_behind_every_so_many_updates():
    model, optimizer = trainer(automatic(10, period=8))
    model(torch.ones(10))
    assert model.getAnchoredTensor(FINAL).tolist() == [1] * 8 + [2] * 2
    model(torch.ones(10))
    assert model.getAnchoredTensor(FINAL).tolist() == [2] * 6 + [4] * 4
    assert factor_of(optimizer) == 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("large", [9000.0, float("inf"), float("nan")])
def test_large_gradients_halve_it(large, dtype):
    model, optimizer = trainer(automatic(), dtype)
    for slope, factor in ((1.0, 2.0), (large, 1.0), (large, 0.5), (1.0, 1.0)):
        model(torch.tensor([slope], dtype=dtype))
        assert factor_of(optimizer) == factor


def test_one_micro_batch_of_many_is_enough():
    model, optimizer = trainer(automatic(1, 4))
    model(torch.tensor([1.0, 9000.0, 1.0, 1.0]))
    assert factor_of(optimizer) == 0.5


def test_settings_of_the_back_end():
    settings = {"binEdgeLocation": 0.5, "thresholdUpperCountProportion": 0.25}
    model, optimizer = trainer(automatic(1, 2, period=2, **settings))
    below = torch.tensor([30000.0, 1.0])
    above = torch.tensor([40000.0, 1.0])
    for slopes, factor in ((below, 1.0), (above, 2.0), (below / 2, 2.0), (below / 2, 4.0)):
        model(slopes)
        assert factor_of(optimizer) == factor
    for slopes, factor in ((above, 4.0), (above, 2.0)):
        model(slopes)
        assert factor_of(optimizer) == factor


@pytest.mark.parametrize(("name", "value"), [("binEdgeLocation", -1.0), ("updatePeriod", 0)])
def test_settings_out_of_range_are_refused(name, value):
    model, _ = trainer(automatic(**{name: value}))
    with pytest.raises(poptorch.Error, match=f"{name}', {value}.*pass a number"):
        model(torch.ones(1))


def test_it_has_limits():
    model, optimizer = trainer(automatic(), loss_scaling=2.0**14)
    for factor in (2.0, 2.0):
        model(torch.full((1,), 2.0**-10))
        assert factor_of(optimizer) == factor
    state = optimizer.state_dict()
    state["ipu_state"][FACTOR].fill_(2.0**-24)
    optimizer.load_state_dict(state)
    model(torch.tensor([float("inf")]))
    assert factor_of(optimizer) == 2.0**-24


def test_small_gradients_of_a_float16_model_survive():
    moved = {}
    for on in (True, False):
        model, _ = trainer(automatic(20, on=on), torch.float16, lr=2.0**20)
        model(torch.full((20,), 2.0**-28))
        moved[on] = model.model.weight.detach().clone()
    # After the first updates the gradients are numbers that float16 has.
    assert (moved[False] == 0).all()
    assert (moved[True] < -0.05).all()


def test_the_seed_is_the_final_scale_and_losses_are_not_scaled():
    options = automatic()
    options.anchorTensor("g", "Gradient___weight")
    model, _ = trainer(options, loss_scaling=4.0, lr=2.0)
    for factor, loss in ((1, 0), (2, -8.0), (4, -16.0)):
        assert model(torch.ones(1)).item() == loss
        assert model.getAnchoredTensor("g").flatten().tolist() == [4.0 * factor] * 4


def test_the_loss_scale_becomes_a_variable():
    model, optimizer = trainer(automatic())
    model(torch.ones(1))
    assert not optimizer.variable_attrs.isConstant("loss_scaling")
    assert optimizer.state_dict()["ipu_param"]["lossScaling_FLOAT"].item() == 1
    optimizer.loss_scaling = 16.0
    model.setOptimizer(optimizer)
    model(torch.ones(1))
    assert model.getAnchoredTensor(FINAL).item() == 32
    assert model.model.weight.tolist() == [-1.0] * 4


def test_a_loaded_state_goes_on():
    model, optimizer = trainer(automatic())
    for _ in range(3):
        model(torch.ones(1))
    state = copy.deepcopy(optimizer.state_dict())
    model.destroy()
    other, its_optimizer = trainer(automatic())
    its_optimizer.load_state_dict(state)
    other.compile(torch.ones(1))
    assert factor_of(its_optimizer) == 8
    model(torch.ones(1))
    assert factor_of(optimizer) == 16


class Staged(nn.Module):
    def __init__(self, ipu):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
        self._ipu = ipu

    def forward(self, x, y):
        poptorch.Block.start(ipu_id=0)
        hidden = torch.tanh(self.first(x))
        poptorch.Block.start(ipu_id=self._ipu)
        return poptorch.identity_loss((self.second(hidden) - y).square(), "mean")


@pytest.mark.parametrize("combined", [True, False])
def test_in_a_pipeline(combined):
    weights = []
    for ipu, on in ((0, False), (0, True), (1, True)):
        module = Staged(ipu)
        optimizer = SGD(module.parameters(), 0.1, momentum=0.9, use_combined_accum=combined)
        model = poptorch.trainingModel(module, automatic(2, 4, on=on), optimizer)
        torch.manual_seed(1)
        model(torch.randn(16, 4), torch.randn(16, 3))
        weights.append([value.clone() for value in module.state_dict().values()])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*weights, strict=True))
