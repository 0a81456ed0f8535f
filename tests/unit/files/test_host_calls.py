"""Files of models that call the host: the code itself stays with the model."""

import os

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.files.operators import check_operators, foreign_operators
from tests.options import make_options


class Calling(nn.Module):
    def __init__(self, function=torch.neg, name="code"):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(3, 2)
        self.cpu = poptorch.CPU(function, name)

    def forward(self, x):
        return self.cpu(self.fc(x))


def test_a_file_is_loaded_into_the_model_alone(tmp_path, caplog):
    net, x, path = Calling(), torch.randn(4, 3), tmp_path / "file"
    model = poptorch.inferenceModel(net, make_options())
    model.compileAndExport(path, x)
    assert "save: the program calls poptorch.CPU, which no file may do by itself" in caplog.text
    with pytest.raises(
        poptorch.Error, match=r"file: Its program calls poptorch.CPU, .*executor\.$"
    ):
        poptorch.load(path)
    again = poptorch.inferenceModel(net, make_options())
    again.loadExecutable(path)
    torch.testing.assert_close(again(x), net(x).detach())


def test_the_code_is_the_models_own(tmp_path):
    """A file does not contain the code: its calls, their IDs and their types are compared."""
    x, path = torch.randn(4, 3), tmp_path / "file"
    model = poptorch.inferenceModel(Calling(), make_options())
    model.compileAndExport(path, x, export_model=False)
    other = Calling(torch.abs)
    model = poptorch.inferenceModel(other, make_options())
    model.loadExecutable(path)
    torch.testing.assert_close(model(x), other.fc(x).detach().abs())
    for wrong in (Calling(name="another"), Calling(lambda x: x[:1]), Calling(lambda x: x.half())):
        model = poptorch.inferenceModel(wrong, make_options())
        with pytest.raises(poptorch.Error, match=r"from another model.*host_call"):
            model.loadExecutable(path)


def test_without_the_model_there_is_no_warning(tmp_path, caplog):
    model = poptorch.inferenceModel(Calling(), make_options())
    model.compileAndExport(tmp_path / "file", torch.randn(4, 3), export_model=False)
    assert "poptorch.CPU" not in caplog.text


@pytest.mark.parametrize("function", [torch.neg, lambda x: -x, nn.ReLU()])
def test_a_program_is_not_cached(tmp_path, function):
    x = torch.randn(4, 3)
    for _ in range(2):
        net = Calling(function)
        options = make_options().enableExecutableCaching(tmp_path)
        torch.testing.assert_close(poptorch.inferenceModel(net, options)(x), net(x).detach())
    assert os.listdir(tmp_path) == []


def test_no_file_may_name_it():
    model = poptorch.inferenceModel(Calling(), make_options())
    model.compile(torch.randn(4, 3))
    graph = model.compiled.program.graph
    assert foreign_operators(graph) == ["poptorch.CPU"]
    with pytest.raises(poptorch.Error, match=r"calls poptorch.CPU, which no file may do"):
        check_operators(graph)
