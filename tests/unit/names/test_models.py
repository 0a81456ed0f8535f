"""Names of all tensors of whole models."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.unit.names.common import MLP_TRAINED, Mlp, batch, inference_names_of, names_of

MLP_FORWARD = {
    "input",
    "fc1.weight",
    "fc1.bias",
    "fc2.weight",
    "fc2.bias",
    "fc1/Gemm:0",
    "relu/Relu:0",
    "fc2/Gemm:0",
}


def test_an_mlp_in_inference():
    names = inference_names_of(Mlp(), batch()[0])
    assert set(names) >= MLP_FORWARD
    assert "input/1" not in names
    assert not any("___" in name for name in names)


def test_an_mlp_in_training():
    names = set(names_of(Mlp(), *batch()))
    assert names >= MLP_FORWARD | {"input/1", "loss/LogSoftmax:0", "loss/Nll:0"}
    for name in MLP_TRAINED:
        assert f"Gradient___{name}" in names
        assert f"UpdatedVar___{name}" in names
        assert f"scaledLearningRate0___specific___{name}" in names
        assert f"weightDecayScaleFactor0___specific___{name}" in names
    for name in ("fc1/Gemm:0", "relu/Relu:0", "fc2/Gemm:0", "loss/LogSoftmax:0", "loss/Nll:0"):
        assert f"Gradient___{name}" in names


def test_what_has_no_gradient_has_no_gradient_name():
    names = names_of(Mlp(), *batch())
    assert "Gradient___input" not in names
    assert "Gradient___input/1" not in names
    assert not any(name.startswith("Gradient___Gradient___") for name in names)
    assert not any(name.startswith("Accum___") for name in names)


def test_parameters_have_the_names_of_named_parameters():
    net = Mlp()
    names = names_of(net, *batch())
    assert [n for n in names if n in dict(net.named_parameters())] == list(MLP_TRAINED)


def test_the_same_forward_names_in_training_and_inference():
    net = Mlp()
    forward = inference_names_of(net, *batch())
    assert set(forward) <= set(names_of(net, *batch()))


def test_names_do_not_depend_on_what_was_compiled_before():
    first = names_of(Mlp(), *batch())
    inference_names_of(Mlp(), batch()[0])
    assert names_of(Mlp(), *batch()) == first


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Sequential(
            nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2, 3)

    def forward(self, x, y):
        x = self.fc(self.pool(self.layer1(x)).flatten(1))
        return x, F.nll_loss(F.log_softmax(x, 1), y)


def test_a_cnn():
    names = set(names_of(Cnn(), torch.randn(2, 1, 8, 8), torch.tensor([0, 2])))
    assert names >= {
        "layer1.0.0.weight",
        "layer1.0.1.running_mean",
        "layer1.0.1.running_var",
        "layer1/0/0/Conv:0",
        "layer1/0/1/BatchNormalization:0",
        "layer1/1/Relu:0",
        "layer1/2/MaxPool:0",
        "fc/Gemm:0",
        "Nll:0",
        "Gradient___layer1.0.0.weight",
        "Gradient___layer1.0.1.bias",
        "Gradient___layer1/1/Relu:0",
        "UpdatedVar___layer1.0.1.weight",
    }
    assert any(name.startswith("pool/") for name in names)
    assert "layer1.0.1.num_batches_tracked" not in names
    assert "UpdatedVar___layer1.0.1.running_mean" not in names
