"""The report that a model leaves when profiling is on."""

import json
import threading

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return poptorch.identity_loss(self.fc(x).square(), "mean")


def train(options):
    model = poptorch.trainingModel(Net(), options)
    model(torch.ones(2, 4))
    model.destroy()


def test_a_report_says_what_the_program_consists_of(tmp_path):
    train(make_options(2).enableProfiling(tmp_path / "reports"))
    report = json.loads((tmp_path / "reports" / "training" / "profile.pop").read_text())
    assert (report["model"], report["kind"]) == ("training", "training")
    assert (report["num_ipus"], report["device_iterations"]) == (1, 2)
    assert sum(report["ops"].values()) > 2


def test_the_name_of_the_model_is_that_of_the_folder(tmp_path):
    options = make_options().enableProfiling(tmp_path).modelName("mine")
    model = poptorch.inferenceModel(nn.Linear(4, 3), options)
    model.compile(torch.ones(2, 4))
    del model
    report = json.loads((tmp_path / "mine" / "profile.pop").read_text())
    assert (report["model"], report["kind"]) == ("mine", "inference")


def test_the_environment_asks_for_a_report(tmp_path, monkeypatch):
    asked = {"autoReport.all": "true", "autoReport.directory": str(tmp_path)}
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", json.dumps(asked))
    train(make_options())
    assert (tmp_path / "training" / "profile.pop").is_file()


def test_without_profiling_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv("POPLAR_ENGINE_OPTIONS", raising=False)
    monkeypatch.chdir(tmp_path)
    train(make_options())
    train_options = make_options()
    train_options._Popart.setEngineOptions({"autoReport.all": "false"})
    train(train_options)
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_another_thread_leaves_one_too(tmp_path):
    thread = threading.Thread(target=train, args=(make_options().enableProfiling(tmp_path),))
    thread.start()
    thread.join()
    assert (tmp_path / "training" / "profile.pop").is_file()


def test_a_loaded_executable_leaves_one_too(tmp_path):
    options = make_options().enableProfiling(tmp_path / "reports")
    net = nn.Linear(4, 3)
    poptorch.inferenceModel(net, make_options()).compileAndExport(
        tmp_path / "net.poptorch", torch.ones(2, 4)
    )
    poptorch.inferenceModel(net, options).loadExecutable(tmp_path / "net.poptorch")
    assert (tmp_path / "reports" / "inference" / "profile.pop").is_file()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    model = poptorch.inferenceModel(
        nn.Linear(4, 3), make_options().enableProfiling(tmp_path / "file")
    )
    with pytest.raises(poptorch.Error, match=r"profile report .*Options\.enableProfiling"):
        model.compile(torch.ones(2, 4))
    assert (model.isCompiled(), model.isAttachedToDevice()) == (False, False)
