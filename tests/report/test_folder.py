"""The files of a report's folder, and the engine options that choose them."""

import json
import logging

import pytest

import popsim_torch as poptorch
from popsim_torch import logs
from popsim_torch.report.folder import choose_folder, write_folder
from popsim_torch.report.settings import Outputs, read_settings
from popsim_torch.report.validated import read_validation, write_validation
from tests.report.data import make_report

FILES = ["debug.json", "framework.json", "profile.pop", "report.html", "trace.json"]


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch):
    monkeypatch.setattr(logs, "_warned", set())


def outputs(tmp_path, **changes):
    settings = {"graph": True, "execution": True, "debug": True, "runs": 2, **changes}
    return Outputs(directory=tmp_path, **settings)


def listed(folder):
    return sorted(path.name for path in folder.iterdir())


def engine(**options):
    return {f"autoReport.{name}": value for name, value in options.items()}


@pytest.mark.parametrize("settings", [{}, engine(all="false"), engine(directory="x")])
def test_nothing_asks_for_a_report(settings):
    assert read_settings(settings) is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"all": "true"}, (True, True, True, 2)),
        ({"all": True, "outputExecutionProfile": False}, (True, False, True, 2)),
        ({"all": "true", "outputDebugInfo": "false"}, (True, True, False, 2)),
        ({"outputGraphProfile": "true"}, (True, False, False, 2)),
        ({"outputDebugInfo": "TRUE"}, (False, False, True, 2)),
        ({"all": "1", "executionProfileProgramRunCount": "10"}, (True, True, True, 10)),
        ({"all": "true", "executionProfileProgramRunCount": 0}, (True, True, True, 0)),
    ],
)
def test_outputs_are_turned_on_and_off(options, expected):
    found = read_settings(engine(**options))
    assert (found.graph, found.execution, found.debug, found.runs) == expected


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"all": "yes"}, "'autoReport.all' is 'yes'. It has to be 'true' or 'false'"),
        (
            {"all": "true", "executionProfileProgramRunCount": "many"},
            "RunCount' is 'many'. It has to be a number of runs",
        ),
        ({"all": "true", "executionProfileProgramRunCount": -1}, "is -1"),
    ],
)
def test_wrong_values_are_refused(options, problem):
    with pytest.raises(ValueError) as error:
        read_settings(engine(**options))
    assert problem in str(error.value)


def test_what_is_not_written_is_said_once(caplog):
    settings = engine(
        all="true",
        outputArchive="true",
        outputSerializedGraph="false",
        outputLoweredVars="true",
        outptDebugInfo="true",
    )
    for _ in range(2):
        read_settings({**settings, "debug.allowOutOfMemory": "true", "opt.other": "1"})
    told = [record.message for record in caplog.records]
    assert len(told) == 4
    assert told[0].startswith(
        "The engine option 'autoReport.outputArchive' has no effect: reports "
    )
    assert "do not have archive.a. They have profile.pop," in told[0]
    assert "outputLoweredVars" in told[1]
    assert told[2].endswith("The nearest one is 'autoReport.outputDebugInfo'.")
    assert told[3] == "The engine option 'opt.other' has no effect."


def test_all_files_are_written(tmp_path):
    write_folder(tmp_path / "a" / "training", outputs(tmp_path), make_report(lanes=4))
    folder = tmp_path / "a" / "training"
    assert listed(folder) == FILES
    assert poptorch.report.open(folder).data == make_report(lanes=4)
    debug = json.loads((folder / "debug.json").read_text())
    assert debug["ops"][0] == {
        "op": "net.block0.fc0/Gemm:0",
        "kind": "matmul",
        "phase": "forward",
        "module": "net.block0.fc0",
        "source": "net.py:10",
        "tensors": ["net.block0.fc0/Gemm:0"],
    }
    framework = json.loads((folder / "framework.json").read_text())
    assert framework["popsim_torch"] == poptorch.__version__ and framework["pid"] == 4711


def test_a_rerun_overwrites_only_the_files_whose_output_is_on(tmp_path):
    folder = tmp_path / "training"
    folder.mkdir()
    for name in [*FILES, "app.json"]:
        (folder / name).write_text("old")
    write_folder(folder, outputs(tmp_path, execution=False, debug=False), make_report())
    old = [path.name for path in sorted(folder.iterdir()) if path.read_text() == "old"]
    assert old == ["app.json", "debug.json", "trace.json"]


def test_without_the_graph_there_is_no_memory(tmp_path):
    write_folder(tmp_path / "x", outputs(tmp_path, graph=False), make_report())
    assert listed(tmp_path / "x") == ["debug.json", "framework.json", "profile.pop", "trace.json"]
    report = poptorch.report.open(tmp_path / "x")
    assert report.estimate["variables"] == [] and report.memory[0].tiles == ()
    assert len(report.ops) == 21 and len(report.runs) == 2
    assert "it fits" in str(report)


def test_without_the_execution_there_are_no_calls(tmp_path):
    write_folder(tmp_path / "x", outputs(tmp_path, execution=False), make_report())
    assert listed(tmp_path / "x") == ["debug.json", "framework.json", "profile.pop", "report.html"]
    assert poptorch.report.open(tmp_path / "x").runs == ()


def test_without_debug_information_there_are_no_lines_of_code(tmp_path):
    write_folder(tmp_path / "x", outputs(tmp_path, debug=False), make_report())
    report = poptorch.report.open(tmp_path / "x")
    assert {op.source for op in report.ops} == {""}
    assert {op["source"] for op in report.data["static"]["host_ops"]} == {""}
    assert "net.py" not in (tmp_path / "x" / "report.html").read_text()


def test_only_debug_information(tmp_path):
    write_folder(tmp_path / "x", outputs(tmp_path, graph=False, execution=False), make_report())
    assert listed(tmp_path / "x") == ["debug.json", "framework.json"]


def test_the_size_is_said_before_writing(tmp_path, caplog, monkeypatch):
    def refuse(*_):
        raise OSError("full")

    monkeypatch.setattr("popsim_torch.report.page.write", refuse)
    with caplog.at_level(logging.INFO, logger="poptorch::python"), pytest.raises(OSError):
        write_folder(tmp_path / "x", outputs(tmp_path), make_report())
    (line,) = (record.message for record in caplog.records)
    assert line.startswith("The report of 'training' will have about 0.")
    assert line.endswith("the trace of 2 recorded calls.")


def test_a_large_trace_says_what_it_shows(tmp_path, caplog):
    data = make_report(layers=60, accumulation=200, iterations=30)
    write_folder(tmp_path / "x", outputs(tmp_path, graph=False), data)
    assert "would be too large. It shows fill, two periods and drain" in caplog.text
    trace = json.loads((tmp_path / "x" / "trace.json").read_text())
    assert "fill, two periods and drain" in trace["otherData"]["shown"]
    assert (tmp_path / "x" / "trace.json").stat().st_size < 22e6


def test_names_of_folders(tmp_path):
    def name(*arguments, **settings):
        return choose_folder(tmp_path, *arguments, **settings).name

    assert name(None, training=True, loop=False) == "training"
    assert name(None, training=False, loop=False) == "inference"
    assert name(None, training=True, loop=False) == "training_2"
    assert name("mine", training=True, loop=True) == "mine"
    assert name(None, training=True, loop=False, process=2) == "training_process_2"
    timed = name(None, training=True, loop=True)
    date, time, pid = timed.removeprefix("popsim_report__").split("__")
    assert len(date) == 10 and time.count("-") == 2 and len(time.split(".")[1].split("_")[0]) == 3
    assert int(pid.split("_")[0]) > 0


def test_the_page_shows_the_notes_of_the_program(tmp_path):
    poptorch.report.annotate(tmp_path / "x", {"learning rate": 0.25})
    write_folder(tmp_path / "x", outputs(tmp_path), make_report())
    assert '"learning rate":0.25' in (tmp_path / "x" / "report.html").read_text()
    assert json.loads((tmp_path / "x" / "app.json").read_text()) == {"learning rate": 0.25}


def test_the_result_of_the_validation_is_kept(tmp_path):
    file = tmp_path / "validated.json"
    assert read_validation(file) is None
    write_validation(12, 11, ("V4", -0.11), file)
    found = read_validation(file)
    assert found == make_report()["validation"] | {"worst": {"id": "V4", "error": -0.11}}
    data = {**make_report(), "validation": found}
    write_folder(tmp_path / "x", outputs(tmp_path), data)
    assert "worst V4 by 11 %" in str(poptorch.report.open(tmp_path / "x"))
