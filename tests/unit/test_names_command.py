"""``popsim names``: the tensors of a model in a file."""

import json
import os
import sys

import pytest

from popsim_torch import __main__ as commands
from popsim_torch import alias

FILE = """
import poptorch
import torch
from torch import nn

import helper


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(x)


class WithLoss(Net):
    def forward(self, x):
        return poptorch.identity_loss(super().forward(x), "mean")


def plain():
    return Net(), helper.batch()


def loss():
    return WithLoss(), (helper.batch(),)


def optimizer():
    net = WithLoss()
    return net, {"x": helper.batch()}, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)


def executor():
    return poptorch.inferenceModel(Net()), [helper.batch()]


def number():
    return 3


def no_model():
    return "model", helper.batch()


def no_optimizer():
    return Net(), helper.batch(), 0.1


def unsupported():
    return nn.Linear(5, 3), helper.batch()


_private = None
"""
HELPER = "import torch\n\n\ndef batch():\n    return torch.zeros(6, 4)\n"


@pytest.fixture
def names(tmp_path, monkeypatch, capsys):
    """Return a function that runs the command: exit code, output, errors."""
    (tmp_path / "nets.py").write_text(FILE)
    (tmp_path / "helper.py").write_text(HELPER)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))

    def run(function, *options):
        monkeypatch.setattr(
            sys, "argv", ["popsim", "names", f"{tmp_path / 'nets.py'}:{function}", *options]
        )
        code = commands.main()
        return code, *capsys.readouterr()

    yield run
    alias.uninstall()
    for name in ("nets", "helper"):
        sys.modules.pop(name, None)


def test_a_model_is_shown_as_a_tree(names):
    code, out, err = names("plain")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["Name", "Shape", "Type", "Kind", "Bytes", "Line"]
    assert [line.split()[0] for line in lines[2:-2]] == [
        *("input", "fc", "fc.weight", "fc.bias", "fc/Transpose:0", "fc/Gemm:0")
    ]
    assert lines[-1] == f"5 tensors, {96 + 48 + 12 + 48 + 72} bytes."
    (result,) = [line for line in lines if "fc/Gemm:0" in line]
    assert result.split()[1:6] == ["(6,", "3)", "float32", "activation", "72"]
    assert "nets.py:" in result


@pytest.mark.parametrize(
    ("function", "there", "missing"),
    [
        ("plain", "fc/Gemm:0", "Gradient___fc.weight"),
        ("loss", "Gradient___fc.weight", "Accl1___fc.weight"),
        ("optimizer", "Accl___fc.weight", "Accl2___fc.weight"),
        ("executor", "fc/Gemm:0", "Gradient___fc.weight"),
    ],
)
def test_it_is_compiled_as_it_will_be_used(names, function, there, missing):
    code, out, _ = names(function, "--json")
    found = [one["name"] for one in json.loads(out)]
    assert code == 0
    assert there in found
    assert missing not in found


def test_patterns_choose(names):
    code, out, _ = names("loss", "--select", "*___fc.bias", "--select", "fc/*", "--json")
    assert code == 0
    found = {one.pop("name"): one for one in json.loads(out)}
    assert {"fc/Gemm:0", "Gradient___fc.bias"} <= set(found)
    assert "fc.weight" not in found
    line = found["Gradient___fc.bias"].pop("source")
    assert line.endswith("nets.py:15")
    assert found["Gradient___fc.bias"] == {
        "shape": [3],
        "dtype": "float32",
        "bytes": 12,
        "kind": "gradient",
        "phase": "backward",
        "module": "fc",
        "stage": 0,
    }


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("plan",), "has no function 'plan'. It has 'plain'"),
        (("_private",), "has no function '_private'"),
        (("number",), "returned an object of type int. Return (model, inputs)"),
        (("no_model",), "returned a tuple that begins with a str. Return"),
        (("no_optimizer",), "returned a float as the optimizer. Return"),
        (("plain", "--select", "fc.wieght"), "no tensor named 'fc.wieght'"),
        (("plain", "--colour"), "names: unrecognized arguments: --colour"),
        (("plain", "--select"), "names: argument --select: expected one argument"),
        (("",), "names: need file.py:function, got "),
    ],
)
def test_mistakes(names, arguments, text):
    code, out, err = names(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("popsim: ")
    assert text in err


def test_a_file_that_is_not_there(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["popsim", "names", f"{tmp_path}/none.py:make"])
    assert commands.main() == 2
    assert f"can't open file '{tmp_path}/none.py'" in capsys.readouterr().err


def test_help(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["popsim", "names", "--help"])
    assert commands.main() == 0
    assert "options of names:" in capsys.readouterr().out
