"""``getTensorNames`` with a pattern and with details."""

import logging
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import tensors
from popsim_torch.errors import UsageTypeError

F32 = torch.float32


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
    assert executor.getTensorNames("Gradient___model.fc.w*") == ["Gradient___fc.weight"]
    assert executor.getTensorNames("*") == executor.getTensorNames()


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (re.compile(r"^Gradient___fc\."), ["Gradient___fc.bias", "Gradient___fc.weight"]),
        (["fc.weight", "Gemm*", "fc/G*"], ["fc.weight", "fc/Gemm:0"]),
        (tensors.updates() & "*.bias", ["UpdatedVar___fc.bias", "UpdatedVar___norm.bias"]),
        (lambda one: one.shape == (3, 4), ["input"]),
        (tensors.Glob("fc.weight"), ["fc.weight"]),
    ],
)
def test_other_selections_choose_names(executor, pattern, expected):
    assert sorted(executor.getTensorNames(pattern)) == sorted(expected)
    assert [one.name for one in executor.names(pattern)] == sorted(
        expected, key=[one.name for one in executor.names()].index
    )


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "kind", "phase", "module"),
    [
        ("input", (3, 4), F32, "input", "setup", ""),
        ("fc.weight", (2, 4), F32, "weight", "setup", "fc"),
        ("norm.running_mean", (2,), F32, "buffer", "setup", "norm"),
        ("fc/Gemm:0", (3, 2), F32, "activation", "forward", "fc"),
        ("Gradient___fc/Gemm:0", (3, 2), F32, "gradient", "backward", "fc"),
        ("Gradient___fc.weight", (2, 4), F32, "gradient", "backward", "fc"),
        ("UpdatedVar___fc.weight", (2, 4), F32, "updated weight", "update", "fc"),
        ("Accl1___fc.weight", (2, 4), F32, "optimizer state", "setup", "fc"),
        ("UpdatedVar___Accl1___fc.weight", (2, 4), F32, "optimizer state", "update", "fc"),
        ("Accum___fc.weight", (2, 4), F32, "optimizer state", "setup", "fc"),
        ("learningRate___specific___fc.weight", (), F32, "hyper-parameter", "setup", "fc"),
        ("AdamUpdater___fc.weight", None, None, "update", "update", "fc"),
    ],
)
def test_details_of_a_tensor(executor, name, shape, dtype, kind, phase, module):
    (found,) = executor.getTensorNames(name, details=True)
    expected = poptorch.TensorInfo(name, shape, dtype, kind, phase, module, 0, found.source)
    assert found == expected
    assert executor.names(name) == [expected]


def test_the_line_of_code_is_that_of_the_call(executor):
    (found,) = executor.names("fc/Gemm:0")
    file, _, line = found.source.rpartition(":")
    assert file.endswith("test_tensor_details.py")
    assert "self.norm(self.fc(x))" in Path(file).read_text().splitlines()[int(line) - 1]


def test_names_are_in_the_order_of_the_program(executor):
    names = [one.name for one in executor.names()]
    assert sorted(names) == sorted(executor.getTensorNames())
    forward, backward = names.index("fc/Gemm:0"), names.index("Gradient___fc/Gemm:0")
    assert names.index("fc.weight") < forward < backward < names.index("UpdatedVar___fc.weight")
    assert names[-1].startswith("AdamUpdater___")  # (computed only if it is anchored)


def test_a_wrong_name_is_refused_with_near_ones(executor):
    with pytest.raises(poptorch.Error, match=r"names: no tensor named 'fc.wieght' .*'fc.weight'"):
        executor.names("fc.wieght")


def test_a_pattern_that_matches_nothing_is_told(executor, caplog):
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        assert executor.names(["fc2.w*", "fc.b*"]) == executor.names("fc.bias")
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith(f"names: 'fc2.w*' matches none of the {len(executor.names())} tensors")
    assert "'fc.weight'" in text


def test_names_need_a_program():
    model = poptorch.trainingModel(Model())
    with pytest.raises(AssertionError, match="names: the model is not compiled"):
        model.names()


def test_a_tree_has_tensors_below_their_modules():
    inner = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 2)))
    model = poptorch.inferenceModel(inner)
    model.compile(torch.zeros(6, 4))
    lines = [line.split("  (")[0].rstrip() for line in model.names().tree(200).splitlines()]
    assert lines[2:] == [
        "input",
        "0",
        "  0.weight",
        "  0.bias",
        "  0/Transpose:0",
        "  0/Gemm:0",
        "1",
        "  0",
        "    1.0.weight",
        "    1.0.bias",
        "    1/0/Transpose:0",
        "    1/0/Gemm:0",
    ]


def test_stages_are_shown_where_there_are_several(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x):
            with poptorch.Block("first", ipu_id=0):
                x = self.a(x)
            with poptorch.Block("second", ipu_id=1):
                return self.b(x)

    options = poptorch.Options().deviceIterations(2)
    model = poptorch.inferenceModel(Two(), options)
    model.compile(torch.zeros(2, 4))
    stages = {one.name: one.stage for one in model.names()}
    assert (stages["a.weight"], stages["b.weight"], stages["b/Gemm:0"]) == (0, 1, 1)
    header = str(model.names("b*")).splitlines()[0].split()
    assert header == ["Name", "Shape", "Type", "Kind", "Bytes", "Stage", "Line"]
    assert model.names(tensors.of_stage(1))[0].name == "b.weight"


def test_details_are_in_the_order_of_the_names(executor):
    found = executor.getTensorNames(details=True)
    assert [one.name for one in found] == executor.getTensorNames()


def test_details_print_as_a_table(executor, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert str(executor.getTensorNames("fc*", details=True)).splitlines()[:4] == [
        "Name            Shape   Type     Kind        Bytes",
        "--------------------------------------------------",
        "fc.weight       (2, 4)  float32  weight      32",
        "fc.bias         (2,)    float32  weight      8",
    ]


def test_a_pattern_has_to_be_a_string(executor):
    with pytest.raises(UsageTypeError, match=r"getTensorNames: a bool selects no tensors\."):
        executor.getTensorNames(True)
