"""``getTensorNames`` with a pattern and with details."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.errors import UsageTypeError


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        return poptorch.identity_loss(self.norm(self.fc(x)).square(), "mean")


@pytest.fixture(scope="module")
def executor():
    model = Model()
    options = poptorch.Options()
    options.Training.gradientAccumulation(2)
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.1)
    wrapped = poptorch.trainingModel(model, options, optimizer)
    wrapped.compile(torch.zeros(6, 4))
    return wrapped


def test_a_pattern_chooses_names(executor):
    found = executor.getTensorNames("Gradient___fc.*")
    assert sorted(found) == ["Gradient___fc.bias", "Gradient___fc.weight"]
    assert executor.getTensorNames("fc.?eight") == ["fc.weight"]
    assert executor.getTensorNames("weight") == []
    assert executor.getTensorNames("*") == executor.getTensorNames()


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "phase"),
    [
        ("input", (3, 4), torch.float32, "input"),
        ("fc.weight", (2, 4), torch.float32, "weight"),
        ("norm.running_mean", (2,), torch.float32, "buffer"),
        ("fc/Gemm:0", (3, 2), torch.float32, "forward"),
        ("Gradient___fc/Gemm:0", (3, 2), torch.float32, "gradient"),
        ("Gradient___fc.weight", (2, 4), torch.float32, "gradient"),
        ("UpdatedVar___fc.weight", (2, 4), torch.float32, "updated weight"),
        ("Accl1___fc.weight", (2, 4), torch.float32, "optimizer state"),
        ("UpdatedVar___Accl1___fc.weight", (2, 4), torch.float32, "optimizer state"),
        ("Accum___fc.weight", (2, 4), torch.float32, "optimizer state"),
        ("learningRate___specific___fc.weight", (), torch.float32, "hyper-parameter"),
        ("AdamUpdater___fc.weight", None, None, "if anchored"),
    ],
)
def test_details_of_a_tensor(executor, name, shape, dtype, phase):
    (found,) = executor.getTensorNames(name, details=True)
    assert found == poptorch.TensorDetails(name, shape, dtype, phase)


def test_details_are_in_the_order_of_the_names(executor):
    found = executor.getTensorNames(details=True)
    assert [one.name for one in found] == executor.getTensorNames()


def test_details_print_as_a_table(executor):
    assert str(executor.getTensorNames("fc*", details=True)).splitlines()[:4] == [
        "Name            Shape   Type     Phase",
        "----------------------------------------",
        "fc.weight       (2, 4)  float32  weight",
        "fc.bias         (2,)    float32  weight",
    ]


def test_a_pattern_has_to_be_a_string(executor):
    with pytest.raises(UsageTypeError, match=r"the pattern is a bool\. Pass a string"):
        executor.getTensorNames(True)
