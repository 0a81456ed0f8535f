"""``profile.pop``: the report that ``Options.enableProfiling`` requests."""

import json
import logging
import os
import subprocess
import sys
import threading

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch import logs
from tests.options import make_options
from tests.unit.executor.nets import Net, train

X, Y = torch.ones(4, 4), torch.zeros(4, dtype=torch.long)


def report(folder, name="training"):
    return json.loads((folder / name / "profile.pop").read_text())


def test_a_destroyed_model_leaves_a_report(tmp_path):
    model = train(Net(), make_options(2, 2).enableProfiling(tmp_path / "new" / "folder"))
    for _ in range(3):
        model(X, Y)
    model.destroy()
    found = report(tmp_path / "new" / "folder")
    assert (found["model"], found["training"], found["calls"]) == ("training", True, 3)
    assert (found["device_iterations"], found["gradient_accumulation"]) == (2, 2)
    assert found["last_call_seconds"] > 0 and found["num_ipus"] == 1
    assert found["memory"]["weights_and_states_bytes"] >= 4 * (4 * 5 + 5 + 5 * 3 + 3)
    (update,) = (op for op in found["ops"] if op["name"] == "UpdatedVar___fc1.weight")
    assert update["phase"] == "update"
    product = next(op for op in found["ops"] if op["scope"] == "fc1")
    assert "nets.py:" in product["source"]
    assert {"name": "fc1/Gemm:0", "dtype": "float32", "shape": [1, 5]} in product["outputs"]


def test_a_dropped_model_leaves_a_report_under_its_name(tmp_path):
    options = poptorch.Options().enableProfiling(tmp_path).modelName("mine")
    model = poptorch.inferenceModel(Net(), options)
    model.compile(X)
    assert not list(tmp_path.iterdir())
    del model
    assert report(tmp_path, "mine")["calls"] == 0


def test_a_model_of_another_thread_leaves_a_report(tmp_path):
    def use():
        poptorch.inferenceModel(Net(), poptorch.Options().enableProfiling(tmp_path))(X)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert report(tmp_path, "inference")["calls"] == 1


def test_a_loop_of_a_function_leaves_a_report_when_it_is_destroyed(tmp_path):
    @poptorch.function(options=poptorch.Options().enableProfiling(tmp_path).modelName("loop"))
    def double_all():
        return poptorch.repeat(6, lambda x: x * 2, inputs=torch.ones(3))

    for _ in range(2):
        assert double_all().tolist() == [64.0] * 3
    double_all.destroy()
    found = report(tmp_path, "loop")
    assert (found["training"], found["calls"], found["device_iterations"]) == (False, 2, 6)
    assert any("test_report.py:" in op["source"] for op in found["ops"])


def test_a_program_that_ends_leaves_a_report(tmp_path):
    code = (
        "import torch, popsim_torch as poptorch\n"
        "model = poptorch.inferenceModel(torch.nn.Linear(4, 2))\n"
        "model(torch.ones(1, 4))\n"
    )
    settings = json.dumps({"autoReport.all": "true", "autoReport.directory": "reports"})
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**_environment(), "POPLAR_ENGINE_OPTIONS": settings},
        check=True,
        timeout=60,
    )
    assert report(tmp_path / "reports", "inference")["calls"] == 1


def _environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def test_a_loaded_model_leaves_a_report(tmp_path):
    poptorch.inferenceModel(Net()).compileAndExport(tmp_path / "net.poptorch", X)
    model = poptorch.inferenceModel(Net(), poptorch.Options().enableProfiling(tmp_path))
    model.loadExecutable(tmp_path / "net.poptorch")
    model.destroy()
    assert report(tmp_path, "inference")["calls"] == 0


def test_a_model_that_was_never_compiled_leaves_none(tmp_path):
    train(Net(), make_options().enableProfiling(tmp_path)).destroy()
    assert not list(tmp_path.iterdir())


def test_without_profiling_there_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = train(Net())
    model(X, Y)
    model.destroy()
    assert not list(tmp_path.iterdir())


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    model = train(Net(), make_options().enableProfiling(tmp_path / "file"))
    model(X, Y)
    with caplog.at_level(logging.WARNING):
        model.destroy()
    assert "enableProfiling: the report cannot be written" in caplog.text
    assert not model.isCompiled()


@pytest.fixture
def nothing_was_said(monkeypatch):
    monkeypatch.setattr(logs, "_warned", set())


@pytest.mark.usefixtures("nothing_was_said")
def test_a_misspelt_option_is_told_once_with_the_nearest_name(tmp_path, monkeypatch, caplog):
    settings = {"autoReport.outptGraphProfile": "true", "autoReport.directory": str(tmp_path)}
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", json.dumps({**settings, "opt.other": "1"}))
    for _ in range(2):
        train(Net())(X, Y)
    told = [record.message for record in caplog.records if "engine option" in record.message]
    assert told == [
        "There is no engine option 'autoReport.outptGraphProfile'; it has no effect. The nearest "
        "one is 'autoReport.outputGraphProfile'.",
        "The engine option 'opt.other' has no effect.",
    ]
    assert not list(tmp_path.iterdir())


def test_each_program_of_a_process_has_a_report_of_its_own(tmp_path):
    options = make_options().enableProfiling(tmp_path)
    first, second = train(Net(), options), train(Net(), options)
    first(X[:1], Y[:1])
    for _ in range(2):
        second(X[:1], Y[:1])
    second.destroy()
    first.destroy()
    first.compile(X[:1], Y[:1])
    del first
    found = {path.name: report(tmp_path, path.name) for path in tmp_path.iterdir()}
    assert {name: one["calls"] for name, one in found.items()} == {
        "training": 1,
        "training_2": 2,
        "training_3": 0,
    }
    assert all(one["model"] == name for name, one in found.items())


@pytest.mark.usefixtures("nothing_was_said")
def test_engine_options_without_effect_are_told_once(tmp_path, caplog):
    options = make_options().enableProfiling(tmp_path)
    engine = {
        "autoReport.executionProfileProgramRunCount": "3",
        "autoReport.outputDebugInfo": "true",
        "autoReport.outputArchive": "false",  # does not request a report
        "target.hostSyncTimeout": "300",
    }
    options._Popart.setEngineOptions({**options._Popart.options["engineOptions"], **engine})
    for _ in range(2):
        train(Net(), options)(X[:1], Y[:1])
    told = [record.message for record in caplog.records if "engine option" in record.message]
    assert told == [
        f"The engine option '{name}' has no effect."
        for name, value in engine.items()
        if value != "false"
    ]
