"""Hyper-parameters as tensors: which of them exist, with which values and dtypes."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import optim
from popsim_torch.enums import ReductionType
from tests.options import make_options
from tests.unit.names.common import names_of

LR, MM, DP, WD, LS, VS = 0.1, 0.9, 0.25, 0.05, 4.0, 2.0
SGD = {"lr": LR, "weight_decay": WD, "dampening": DP, "loss_scaling": LS}
COMBINED = {"momentum": MM, "use_combined_accum": True, "velocity_scaling": VS}
ADAM = {"lr": LR, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": WD, "loss_scaling": LS}
RMSPROP = {"lr": LR, "alpha": 0.9, "eps": 1e-3, "weight_decay": WD, "momentum": MM}
NESTEROV = {"momentum": MM, "nesterov": True, "dampening": None}
ADAM_VALUES = {
    "learningRate": LR,
    "weightDecay": WD,
    "adamBeta1": 0.8,
    "adamBeta2": 0.95,
    "adamEps": 1e-3,
}

# The optimizer and its settings, then the values; af is the divisor of gradients.
TABLE = {
    "SGD": (
        optim.SGD,
        SGD,
        lambda af: {
            "scaledLearningRate0": LR * (1 - DP) / (LS * af),
            "weightDecayScaleFactor0": 1 - LR * (1 - DP) * WD,
        },
    ),
    "SGD, momentum": (
        optim.SGD,
        SGD | {"momentum": MM},
        lambda af: {
            "scaledLearningRate2": LR / LS,
            "scaledWeightDecay1": (1 - DP) * WD * LS,
            "dampeningScaleFactor2": (1 - DP) / af,
            "scaledMomentum2": MM,
        },
    ),
    "SGD, Nesterov": (
        optim.SGD,
        SGD | NESTEROV,
        lambda af: {
            "scaledLearningRate2": LR / LS,
            "scaledWeightDecay1": WD * LS,
            "dampeningScaleFactor2": 1 / af,
            "scaledMomentum2": MM,
            "nesterovGradScaleFactor2": LS,
            "nesterovDampeningScaleFactor2": 1 / (LS * af),
            "sgdMomentum": MM,
            "sgdWeightDecay": WD,
        },
    ),
    "SGD, combined": (
        optim.SGD,
        SGD | COMBINED,
        lambda af: {
            "scaledLearningRate1": LR / VS,
            "scaledWeightDecay1": (1 - DP) * WD * VS,
            "dampeningScaleFactor1": (1 - DP) * VS / (LS * af),
            "scaledMomentum1": MM,
        },
    ),
    "SGD, combined Nesterov": (
        optim.SGD,
        SGD | COMBINED | NESTEROV,
        lambda af: {
            "scaledLearningRate1": LR / VS,
            "scaledWeightDecay1": WD * VS,
            "dampeningScaleFactor1": VS / (LS * af),
            "scaledMomentum1": MM,
            "nesterovGradScaleFactor1": VS,
            "nesterovDampeningScaleFactor1": 1 / (LS * af),
            "sgdMomentum": MM,
            "sgdWeightDecay": WD,
        },
    ),
    "Adam": (optim.Adam, ADAM, lambda af: ADAM_VALUES | {"adamGradientScaling": LS * af}),
    "AdamW": (optim.AdamW, ADAM, lambda af: ADAM_VALUES | {"adamGradientScaling": LS * af}),
    "LAMB": (
        optim.LAMB,
        ADAM | {"max_weight_norm": 3.0},
        lambda af: ADAM_VALUES | {"adamGradientScaling": LS * af, "maxWeightNorm": 3.0},
    ),
    "RMSprop": (
        optim.RMSprop,
        RMSPROP | {"loss_scaling": LS},
        lambda af: {
            "learningRate": LR,
            "weightDecay": WD,
            "adaptiveAlpha": 0.9,
            "adaptiveMomentum": MM,
            "adaptiveEps": 1e-3,
            "adaptiveGradientScaling": LS * af,
        },
    ),
}
OF_HALF_WEIGHTS = ("weightDecayScaleFactor", "scaledMomentum", "sgdMomentum")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return poptorch.identity_loss(self.fc(x).square(), "mean")


def run(make, settings, *, reduction=ReductionType.Mean, anchors=(), dtype=torch.float32):
    options = make_options(1, 2)
    options.Training.accumulationAndReplicationReductionType(reduction)
    for name in anchors:
        options.anchorTensor(name, name)
    net = Net().to(dtype)
    model = poptorch.trainingModel(net, options, make(net.parameters(), **settings))
    model(torch.randn(4, 4, dtype=dtype))
    return model


def scalar_names(model):
    return {n for n in model.getTensorNames() if "___specific___" in n or "___default___" in n}


@pytest.mark.parametrize("reduction, af", [(ReductionType.Mean, 2), (ReductionType.Sum, 1)])
@pytest.mark.parametrize("case", TABLE)
def test_values(case, reduction, af):
    make, settings, values_for = TABLE[case]
    expected = {
        f"{prefix}___specific___{weight}": value
        for prefix, value in values_for(af).items()
        for weight in ("fc.weight", "fc.bias")
    } | {"lossScaling_FLOAT": LS}
    model = run(make, settings, reduction=reduction, anchors=expected)
    assert scalar_names(model) == set(expected) - {"lossScaling_FLOAT"}
    for name, value in expected.items():
        found = model.getAnchoredTensor(name)
        assert (found.shape, found.dtype) == ((), torch.float32)
        assert found.item() == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("case", TABLE)
def test_constants_are_no_tensors(case):
    make, settings, _ = TABLE[case]
    structural = {"use_combined_accum", "nesterov", "momentum"}
    kept = {name: value for name, value in settings.items() if name in structural}
    net = Net()
    optimizer = (
        make(net.parameters(), lr=None, **kept) if make is optim.SGD else make(net.parameters())
    )
    names = set(optimizer.defaults) | {"loss_scaling"}
    for name in names:
        optimizer.variable_attrs.markAsConstant(name)
    listed = names_of(net, torch.randn(2, 4), optimizer=optimizer)
    assert not any("___specific___" in name or "lossScaling" in name for name in listed)


@pytest.mark.parametrize("case", ["SGD", "SGD, momentum", "SGD, Nesterov", "SGD, combined", "Adam"])
def test_some_follow_the_weight(case):
    make, settings, values_for = TABLE[case]
    expected = {f"{p}___specific___fc.weight": v for p, v in values_for(2).items()}
    model = run(make, settings, anchors=expected, dtype=torch.float16)
    for name, value in expected.items():
        found = model.getAnchoredTensor(name)
        half = name.startswith(OF_HALF_WEIGHTS)
        assert found.dtype == (torch.float16 if half else torch.float32)
        assert found.item() == pytest.approx(value, rel=1e-3)


def test_weights_decay_by_less_than_float16_can_tell():
    torch.manual_seed(0)
    net = Net().half()
    decay = {"lr": 0.1, "weight_decay": 1e-3}  # 1 - 1e-4 is 1 in float16
    name = "weightDecayScaleFactor0___specific___fc.weight"
    options = make_options()
    options.anchorTensor("it", name)
    with torch.no_grad():
        net.fc.weight.fill_(1.0)
    optimizer = optim.SGD(net.parameters(), **decay, loss_scaling=LS)
    model = poptorch.trainingModel(net, options, optimizer)
    model(torch.zeros(1, 4, dtype=torch.float16))
    assert model.getAnchoredTensor("it").item() == 1.0
    saved = optimizer.state_dict()["ipu_param"]
    assert saved[name].item() == pytest.approx(1 - 1e-4, rel=1e-6)
    assert "lossScaling_FLOAT16" in saved


@pytest.mark.parametrize(
    "dtype, name", [(torch.float32, "lossScaling_FLOAT"), (torch.float16, "lossScaling_FLOAT16")]
)
def test_the_loss_scale_is_named_by_the_type_of_the_loss(dtype, name):
    net = Net().to(dtype)
    optimizer = optim.SGD(net.parameters(), lr=0.1, loss_scaling=LS)
    options = make_options()
    options.anchorTensor("scale", name)
    model = poptorch.trainingModel(net, options, optimizer)
    model(torch.randn(2, 4, dtype=dtype))
    assert model.getAnchoredTensor("scale").item() == LS
    assert [n for n in model.getTensorNames() if n.startswith("lossScaling")] == [name]
    optimizer.loss_scaling = 8.0
    model.setOptimizer(optimizer)
    model(torch.randn(2, 4, dtype=dtype))
    assert model.getAnchoredTensor("scale").item() == 8.0
    assert optimizer.state_dict()["ipu_param"][name].item() == 8.0


def test_a_reserved_name_is_no_name_for_a_parameter():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_parameter("Accl1___w", nn.Parameter(torch.ones(2)))

        def forward(self, x):
            return poptorch.identity_loss(x * self.Accl1___w, "sum")

    with pytest.raises(poptorch.Error, match=r"Accl1___w.*reserved"):
        names_of(Odd(), torch.ones(1, 2))
