"""``profile.pop``: the report that ``Options.enableProfiling`` requests."""

import json
import logging
import os
import re
import subprocess
import sys
import threading
import time

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
    static = found["static"]
    assert (found["name"], static["training"], found["calls"]) == ("training", True, 3)
    assert (static["device_iterations"], static["gradient_accumulation"]) == (2, 2)
    assert static["num_ipus"] == 1 and found["pid"] == os.getpid()
    assert static["host_memory"]["weights_and_states_bytes"] >= 4 * (4 * 5 + 5 + 5 * 3 + 3)
    (update,) = (op for op in static["host_ops"] if op["name"] == "UpdatedVar___fc1.weight")
    assert update["phase"] == "update"
    product = next(op for op in static["host_ops"] if op["scope"] == "fc1")
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
    static = found["static"]
    assert (static["training"], found["calls"], static["device_iterations"]) == (False, 2, 6)
    assert any("test_report.py:" in op["source"] for op in static["host_ops"])
    assert [run["number"] for run in found["runs"]] == [0, 1]


def test_a_loop_without_a_name_has_a_folder_with_date_time_and_process(tmp_path):
    for _ in range(2):

        @poptorch.function(options=poptorch.Options().enableProfiling(tmp_path))
        def double_all():
            return poptorch.repeat(6, lambda x: x * 2, inputs=torch.ones(3))

        double_all()
        double_all.destroy()
    names = [path.name for path in tmp_path.iterdir()]
    pattern = rf"popsim_report__\d{{4}}(-\d\d){{2}}__\d\d(-\d\d){{2}}\.\d{{3}}__{os.getpid()}(_\d)?"
    assert len(names) == 2 and all(re.fullmatch(pattern, name) for name in names)


def test_the_report_is_whole(tmp_path):
    model = train(Net(), make_options(2, 2).enableProfiling(tmp_path))
    for _ in range(3):
        model(X, Y)
    model.destroy()
    assert sorted(path.name for path in (tmp_path / "training").iterdir()) == [
        *("debug.json", "framework.json", "profile.pop", "report.html", "trace.json")
    ]
    found = poptorch.report.open(tmp_path)
    assert found.estimate["training"] and found.estimate["batch"]["gradient_accumulation"] == 2
    assert {"fc1", "fc2"} <= set(found.by_module())
    assert list(found.by_purpose()) == ["gradient accumulation", "SGD"]
    assert [run.simulated_cycles for run in found.runs] == [found.estimate["call"]["cycles"]] * 2
    # F and B of four micro-batches, and two updates.
    assert [len(run.lanes) for run in found.runs] == [10, 10]
    for run in found.runs:
        assert all(0 <= one["begin"] <= one["end"] <= run.measured_seconds for one in run.lanes)


@pytest.mark.parametrize(("runs", "recorded"), [("1", 1), ("10", 4), ("0", 0)])
def test_as_many_calls_are_recorded_as_wanted(tmp_path, monkeypatch, runs, recorded):
    settings = {"autoReport.executionProfileProgramRunCount": runs}
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", json.dumps(settings))
    model = train(Net(), make_options().enableProfiling(tmp_path))
    begin = time.perf_counter()
    for _ in range(4):
        model(X[:1], Y[:1])
    end = time.perf_counter()
    model.destroy()
    found = poptorch.report.open(tmp_path)
    assert found.calls == 4 and [run.number for run in found.runs] == list(range(recorded))
    times = [time for run in found.runs for time in (run.begin, run.end)]
    assert times == sorted(times)
    assert all(begin < time < end for time in times)


def test_calls_that_are_not_recorded_do_nothing_more(tmp_path):
    """After the first calls the program runs as without a report."""
    model = train(Net(), make_options().enableProfiling(tmp_path))
    for _ in range(2):
        model(X[:1], Y[:1])
        assert model._device.judge is None or model._device.last_complete_run == 1
    assert model._device.judge is None
    assert model.compiled.executable.timeline() is None
    plain = train(Net())
    plain(X[:1], Y[:1])
    assert plain._device.judge is None and plain._device._report is None


def test_recorded_timelines_of_the_user_are_kept(tmp_path):
    model = train(Net(), make_options().enableProfiling(tmp_path))
    model(X[:1], Y[:1])
    with pytest.raises(poptorch.Error, match="no complete run has been recorded"):
        model.timeline()
    model.record_timeline()
    for _ in range(3):
        model(X[:1], Y[:1])
        assert len(model.timeline()) == 3
    model.record_timeline(False)
    model.destroy()
    assert len(poptorch.report.open(tmp_path).runs[1].lanes) == 3


def test_values_do_not_depend_on_a_report(tmp_path):
    weights = []
    for options in (make_options(2, 2), make_options(2, 2).enableProfiling(tmp_path)):
        torch.manual_seed(0)
        net = Net()
        model = train(net, options)
        losses = [one for _ in range(4) for one in model(X, Y)]
        model.destroy()
        weights.append([*losses, *(one.detach().clone() for one in net.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_conditions_are_judged_while_calls_are_recorded(tmp_path):
    met = []
    options = make_options().enableProfiling(tmp_path)
    options.observe("fc1.weight", poptorch.Moments(), when=lambda record: True, then=met.append)
    model = train(Net(), options)
    for _ in range(4):
        model(X[:1], Y[:1])
    model.destroy()
    assert len(met) >= 1 and len(poptorch.report.open(tmp_path).runs) == 2


def test_a_model_that_is_compiled_again_records_again(tmp_path):
    model = train(Net(), make_options().enableProfiling(tmp_path))
    for _ in range(2):
        model(X[:1], Y[:1])
        model.destroy()
    for name in ("training", "training_2"):
        found = poptorch.report.open(tmp_path / name)
        assert (found.calls, len(found.runs)) == (1, 1)


def test_the_variable_wins(tmp_path, monkeypatch, caplog):
    settings = {
        "autoReport.directory": str(tmp_path / "of_variable"),
        "autoReport.outputExecutionProfile": "false",
    }
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", json.dumps(settings))
    model = train(Net(), make_options().enableProfiling(tmp_path / "of_options"))
    assert "POPLAR_ENGINE_OPTIONS configures reports, too" in caplog.text
    model(X[:1], Y[:1])
    model.destroy()
    assert [path.name for path in tmp_path.iterdir()] == ["of_variable"]
    assert not (tmp_path / "of_variable" / "training" / "trace.json").exists()


@pytest.mark.parametrize("value", ["", "{}"])
def test_an_empty_variable_makes_no_folder(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", value)
    model = train(Net())
    model(X[:1], Y[:1])
    model.destroy()
    assert not list(tmp_path.iterdir())


def test_a_wrong_option_is_refused_before_the_device_is_taken(tmp_path, monkeypatch):
    settings = {"autoReport.all": "true", "autoReport.executionProfileProgramRunCount": "many"}
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", json.dumps(settings))
    model = train(Net())
    with pytest.raises(poptorch.Error, match="RunCount' is 'many'"):
        model(X[:1], Y[:1])
    assert not model.isCompiled() and not model.isAttachedToDevice()


def test_a_forked_process_writes_no_report(tmp_path):
    code = (
        "import os, torch, popsim_torch as poptorch\n"
        "model = poptorch.inferenceModel(torch.nn.Linear(4, 2))\n"
        "model(torch.ones(1, 4))\n"
        "if os.fork() == 0:\n"
        "    raise SystemExit(0)\n"
        "os.wait()\n"
        "print(os.path.exists('inference'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**_environment(), "POPLAR_ENGINE_OPTIONS": '{"autoReport.all": "true"}'},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "False\n")
    assert report(tmp_path, "inference")["calls"] == 1


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
    assert all(one["name"] == name for name, one in found.items())


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
    assert told == ["The engine option 'target.hostSyncTimeout' has no effect."]


@pytest.mark.parametrize("wanted", [True, False])
def test_a_program_that_does_not_fit_is_reported_before_it_is_refused(tmp_path, caplog, wanted):
    options = make_options().machine(tiles=1, out_of_memory="raise")
    if wanted:
        options.enableProfiling(tmp_path)
    net = torch.nn.Linear(1000, 400)
    model = poptorch.inferenceModel(net, options)
    with pytest.raises(poptorch.Error, match="Cannot fit all variable data") as error:
        model(torch.ones(1, 1000))
    folder = tmp_path / "inference"
    where = f"Out of memory, the graph profile is available here: {folder}"
    assert (where in error.value.message) == wanted == (where in caplog.text)
    if not wanted:
        assert not list(tmp_path.iterdir())
        return
    found = poptorch.report.open(folder)
    assert found.calls == 0 and found.runs == ()
    assert found.estimate["verdict"] == "does not fit"
    assert "it does not fit" in str(found)


def test_a_report_says_why_there_is_no_estimate(tmp_path, monkeypatch):
    def refuse(*_):
        raise poptorch.Error("the machine has no tiles left")

    monkeypatch.setattr("popsim_torch.executor.report.compiled_estimate", refuse)
    model = train(Net(), make_options().enableProfiling(tmp_path))
    model(X[:1], Y[:1])
    model.destroy()
    found = poptorch.report.open(tmp_path)
    assert found.estimate is None and "no tiles left" in found.why_no_estimate
    assert found.runs[0].simulated_cycles is None and len(found.runs[0].lanes) == 3
    assert "no tiles left" in (tmp_path / "training" / "report.html").read_text()
    trace = json.loads((tmp_path / "training" / "trace.json").read_text())
    assert {one["pid"] for one in trace["traceEvents"]} == {1000}
