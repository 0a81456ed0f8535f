"""Names of gradients, optimizer states and updated weights."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.unit.names.common import (
    MLP_TRAINED,
    Function,
    Mlp,
    batch,
    inference_names_of,
    make_options,
    names_of,
    trained,
)


def test_accumulators_exist_with_gradient_accumulation_only():
    with_accumulation = names_of(Mlp(), *batch(), options=make_options(1, 2))
    assert {"Accum___fc1.weight", "UpdatedVar___Accum___fc1.weight"} <= set(with_accumulation)
    assert not any("Accum___" in name for name in names_of(Mlp(), *batch()))


@pytest.mark.parametrize("ga", [1, 2])
@pytest.mark.parametrize(
    "make, states",
    [
        (lambda p: poptorch.optim.SGD(p, lr=0.1), []),
        (lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.9), ["Accl"]),
        (
            lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.9, use_combined_accum=True),
            ["Accl"],
        ),
        (lambda p: poptorch.optim.Adam(p, lr=0.1), ["Accl1", "Accl2", "Step"]),
        (lambda p: poptorch.optim.AdamW(p, lr=0.1), ["Accl1", "Accl2", "Step"]),
        (lambda p: poptorch.optim.RMSprop(p, lr=0.1), ["Accl1"]),
        (lambda p: poptorch.optim.RMSprop(p, lr=0.1, momentum=0.9), ["Accl1", "Accl2"]),
        (
            lambda p: poptorch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
            ["Accl1", "Accl2", "Accl3"],
        ),
        (lambda p: poptorch.optim.LAMB(p, lr=0.1), ["Accl1", "Accl2", "Step"]),
    ],
    ids=[
        "SGD",
        "momentum",
        "combined",
        "Adam",
        "AdamW",
        "RMSprop",
        "RMSprop+momentum",
        "centered",
        "LAMB",
    ],
)
def test_optimizer_state(make, states, ga):
    net = Mlp()
    names = names_of(net, *batch(), options=make_options(1, ga), optimizer=make(net.parameters()))
    known = {"Accl", "Accl1", "Accl2", "Accl3", "Step"}
    for weight in MLP_TRAINED:
        found = {n.split("___")[0] for n in names if n.endswith(f"___{weight}")} & known
        assert found == set(states)


SCALARS = [
    (lambda p: poptorch.optim.SGD(p, lr=0.1), {"scaledLearningRate0", "weightDecayScaleFactor0"}),
    (lambda p: torch.optim.SGD(p, lr=0.1), {"scaledLearningRate0", "weightDecayScaleFactor0"}),
    (
        lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.5),
        {"scaledLearningRate2", "scaledMomentum2"},
    ),
    (lambda p: poptorch.optim.Adam(p), set()),
    (lambda p: poptorch.optim.Adam(p, lr=0.1), {"learningRate"}),
    (
        lambda p: torch.optim.Adam(p),
        {"learningRate", "weightDecay", "adamBeta1", "adamBeta2", "adamEps"},
    ),
    (lambda p: poptorch.optim.Adam(p, betas=(0.5, 0.5)), {"adamBeta1", "adamBeta2"}),
    (lambda p: poptorch.optim.Adam(p, eps=1e-3), {"adamEps"}),
    (lambda p: poptorch.optim.Adam(p, weight_decay=0.1), {"weightDecay"}),
    (lambda p: poptorch.optim.Adam(p, loss_scaling=2.0), {"adamGradientScaling"}),
    (
        lambda p: poptorch.optim.RMSprop(p, lr=0.1, alpha=0.5, eps=1e-3, momentum=0.5),
        {"learningRate", "adaptiveAlpha", "adaptiveEps", "adaptiveMomentum"},
    ),
]


@pytest.mark.parametrize("make, prefixes", SCALARS)
def test_only_variable_scalars_have_names(make, prefixes):
    net = Mlp()
    names = names_of(net, *batch(), optimizer=make(net.parameters()))
    found = {name.split("___specific___")[0] for name in names if "___specific___" in name}
    assert found == prefixes
    for prefix in prefixes:
        assert f"{prefix}___specific___fc2.bias" in names


@pytest.mark.parametrize("scaling, listed", [(None, False), (1.0, True), (8.0, True)])
def test_the_loss_scale_has_a_name_when_it_is_variable(scaling, listed):
    net = Mlp()
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1, loss_scaling=scaling)
    assert ("lossScaling_FLOAT" in names_of(net, *batch(), optimizer=optimizer)) == listed


def test_a_parameter_in_no_group_uses_the_defaults():
    net = Mlp()
    optimizer = poptorch.optim.SGD([net.fc1.weight], lr=0.1)
    names = names_of(net, *batch(), optimizer=optimizer)
    assert "scaledLearningRate0___specific___fc1.weight" in names
    assert "scaledLearningRate0___specific___fc1.bias" not in names
    assert "scaledLearningRate0___default___FLOAT" in names


@pytest.mark.parametrize("old", [True, False], ids=["with model.", "without"])
@pytest.mark.parametrize(
    "name",
    [
        "{}fc1.weight",
        "Gradient___{}fc1.weight",
        "UpdatedVar___{}fc2.bias",
        "Accum___{}fc1.bias",
        "scaledLearningRate0___specific___{}fc1.weight",
    ],
)
def test_anchors_find_names_of_older_releases(name, old):
    options = make_options(1, 2)
    options.anchorTensor("old", name.format("model." if old else ""), poptorch.OutputMode.All)
    options.anchorTensor("new", name.format(""), poptorch.OutputMode.All)
    model = trained(Mlp(), *batch(), options=options)
    model(*batch())
    assert torch.equal(model.getAnchoredTensor("old"), model.getAnchoredTensor("new"))
    assert not any("model." in n for n in model.getTensorNames())


class Wrapped(nn.Module):
    """A user's own wrapper: its parameters' names really begin with ``model.``."""

    def __init__(self):
        super().__init__()
        self.model = Mlp()

    def forward(self, x, y):
        return self.model(x, y)


@pytest.mark.parametrize("prefix", ["model.", "", "model.model."])
def test_anchors_add_and_remove_the_prefix(prefix):
    options = make_options()
    options.anchorTensor("it", f"Gradient___{prefix}fc1.weight")
    options.anchorTensor("exact", "Gradient___model.fc1.weight")
    model = trained(Wrapped(), *batch(), options=options)
    assert "Gradient___model.fc1.weight" in model.getTensorNames()
    assert "model/fc1/Gemm:0" in model.getTensorNames()
    model(*batch())
    assert torch.equal(model.getAnchoredTensor("it"), model.getAnchoredTensor("exact"))


def test_a_name_as_written_comes_first():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.model = nn.Module()
            self.model.fc = nn.Linear(2, 2)

        def forward(self, x):
            return self.model.fc(self.fc(x))

    net = Both()
    options = make_options()
    options.anchorTensor("outer", "fc.weight")
    options.anchorTensor("inner", "model.fc.weight")
    model = poptorch.inferenceModel(net, options)
    model(torch.ones(1, 2))
    assert torch.equal(model.getAnchoredTensor("outer"), net.fc.weight)
    assert torch.equal(model.getAnchoredTensor("inner"), net.model.fc.weight)


def test_an_anchor_keeps_an_unused_result_alive():
    def function(x):
        with poptorch.NameScope("aside"):
            x.exp()
        return x + 1

    assert "aside/Exp:0" not in inference_names_of(Function(function), torch.ones(2))
    options = make_options()
    options.anchorTensor("it", "aside/Exp:0")
    model = poptorch.inferenceModel(Function(function), options)
    x = torch.tensor([0.0, 1.0])
    model(x)
    torch.testing.assert_close(model.getAnchoredTensor("it"), x.exp())


def test_the_list_is_the_callers_own():
    model = trained(Mlp(), *batch())
    names = model.getTensorNames()
    names.clear()
    assert "fc1.weight" in model.getTensorNames()


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_names_that_utf8_cannot_express(training):
    """Such names come from ``os.fsdecode`` of a file name; the device shows them escaped."""
    name = "layer\udcff"

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module(name, nn.Linear(4, 3))
            self.register_buffer(f"{name}_scale", torch.tensor(2.0))

        def forward(self, x):
            y = self._modules[name](x) * self._buffers[f"{name}_scale"]
            return y, poptorch.identity_loss(y, "sum")

    net, x = Odd(), torch.randn(2, 4)
    expected = net(x)[0].detach()
    options = poptorch.Options()
    options.showCompilationProgressBar(False)
    options.anchorTensor("out", f"{name}/Gemm:0")
    model = (
        poptorch.trainingModel(net, options) if training else poptorch.inferenceModel(net, options)
    )
    torch.testing.assert_close(model(x)[0], expected)
    torch.testing.assert_close(model.getAnchoredTensor("out"), expected / 2)
    assert f"{name}.weight" in model.getTensorNames()
