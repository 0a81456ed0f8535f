"""What is logged, where it goes, and how lines look."""

import io
import logging
import re
import sys
from collections.abc import Iterator

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch import logs

LINE = r"\[\d\d:\d\d:\d\d\.\d\d\d\] \[%s\] \[%s\] %s\n"


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    poptorch.setLogLevel("WARN")
    logs.limit_repeats(4)


def shown_by(logger: logging.Logger, level: int, capsys: pytest.CaptureFixture[str]) -> bool:
    logger.log(level, "whether it is shown")
    return "whether it is shown" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("level", "name", "logger"),
    [
        (logging.WARNING, "warning", logs.python),
        (logging.ERROR, "error", logs.python),
        (logging.CRITICAL, "critical", logs.python),
        (logging.INFO, "info", logs.backend),
        (logging.DEBUG, "debug", logs.backend),
        (logs.TRACE, "trace", logs.backend),
    ],
)
def test_a_line_has_time_logger_and_level(level, name, logger, capsys):
    poptorch.setLogLevel("TRACE")
    logger.log(level, "text of %d", 3)
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(LINE % (re.escape(logger.name), name, "text of 3"), err)


def test_the_loggers_have_poptorchs_names():
    assert (logs.python.name, logs.backend.name) == ("poptorch::python", "poptorch:cpp")


def test_warnings_are_shown_by_default_and_what_is_less_is_not(capsys):
    assert shown_by(logs.python, logging.WARNING, capsys)
    assert not shown_by(logs.python, logging.INFO, capsys)
    assert not shown_by(logs.backend, logging.INFO, capsys)


ORDER = ["TRACE_ALL", "TRACE", "DEBUG_IR", "DEBUG", "INFO", "WARN", "ERR"]


@pytest.mark.parametrize("level", ORDER)
def test_a_level_shows_itself_and_those_behind_it(level, capsys):
    poptorch.setLogLevel(level)
    shown = [name for name in ORDER if shown_by(logs.backend, getattr(logs, name), capsys)]
    assert shown == ORDER[ORDER.index(level) :]


def test_off_shows_nothing(capsys):
    poptorch.setLogLevel("OFF")
    assert not shown_by(logs.python, logging.CRITICAL, capsys)


@pytest.mark.parametrize(
    ("number", "level"),
    [(0, "TRACE"), (1, "DEBUG"), (2, "INFO"), (3, "WARN"), (4, "ERR"), (6, "OFF")],
)
def test_levels_have_numbers(number, level):
    poptorch.setLogLevel(number)
    assert logs.python.level == logs.backend.level == getattr(logs, level)


def test_an_unknown_number_is_refused():
    with pytest.raises(ValueError, match="Invalid log level integer: 5"):
        poptorch.setLogLevel(5)


@pytest.mark.parametrize("name", ["debug", "LOUD", ""])
def test_an_unknown_name_is_refused_with_those_that_there_are(name):
    with pytest.raises(ValueError, match="Unknown log level: ") as caught:
        poptorch.setLogLevel(name)
    assert f"Unknown log level: {name}." in str(caught.value)
    assert "DEBUG, ERR, INFO, OFF, TRACE and WARN" in str(caught.value)


@pytest.mark.parametrize("level", [None, 1.0, True])
def test_what_is_no_level_is_refused(level):
    with pytest.raises(TypeError, match="must be a string or an int"):
        poptorch.setLogLevel(level)


def test_a_refused_level_changes_nothing():
    poptorch.setLogLevel("ERR")
    with pytest.raises(ValueError, match="LOUD"):
        poptorch.setLogLevel("LOUD")
    assert logs.python.level == logs.ERR


def test_caplog_sees_both_loggers(caplog):
    poptorch.setLogLevel("TRACE")
    logs.python.info("one")
    logs.trace("two %s", "x")
    assert [record.getMessage() for record in caplog.records] == ["one", "two x"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_levels_are_coloured_on_a_terminal(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stderr", Terminal())
    logs.python.warning("careful")
    assert re.search(r"\] \[\x1b\[[\d;]+mwarning\x1b\[m\] careful\n$", sys.stderr.getvalue())


def test_nothing_is_coloured_where_colours_are_not_wanted(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stderr", Terminal())
    logs.python.warning("careful")
    assert "\x1b" not in sys.stderr.getvalue()


def test_a_process_without_stderr_goes_on(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    logs.python.warning("nobody reads this")


def test_loggers_below_ours_are_shown_too(capsys):
    logs.python.getChild("part").warning("from below")
    assert capsys.readouterr().err.endswith("[poptorch::python.part] [warning] from below\n")


# Repeated lines


def test_a_warning_that_repeats_is_replaced_by_one_notice(capsys):
    logs.limit_repeats(2)
    for _ in range(5):
        logs.python.warning("again")
    lines = capsys.readouterr().err.splitlines()
    assert [line.endswith("[warning] again") for line in lines] == [True, True, False]
    assert "not repeated any more" in lines[2]
    assert "maxRepeatLogs" in lines[2]


def test_other_lines_are_counted_on_their_own(capsys):
    logs.limit_repeats(1)
    for text in "abab":
        logs.python.warning("line %s", text)
    assert len(capsys.readouterr().err.splitlines()) == 4  # both, and a notice for each


def test_what_is_less_than_a_warning_is_never_left_out(capsys):
    poptorch.setLogLevel("DEBUG")
    logs.limit_repeats(1)
    for _ in range(9):
        logs.backend.debug("once for each call")
    assert len(capsys.readouterr().err.splitlines()) == 9


def test_a_compilation_sets_the_limit_and_counts_anew(capsys):
    options = poptorch.Options().maxRepeatLogs(1).showCompilationProgressBar(False)
    model = poptorch.inferenceModel(torch.nn.ReLU(), options)
    for _ in range(3):
        logs.python.warning("again")
    assert len(capsys.readouterr().err.splitlines()) == 3
    model(torch.ones(2))
    for _ in range(3):
        logs.python.warning("again")
    assert len(capsys.readouterr().err.splitlines()) == 2


# The environment, and uncaught exceptions


@pytest.fixture
def obeyed(monkeypatch):
    """Set up the loggers as an environment variable would, for one test."""

    def obey(variable: str, value: str) -> None:
        monkeypatch.setenv(variable, value)
        logs.obey_environment()

    yield obey
    monkeypatch.undo()
    logs.obey_environment()


def test_the_variable_sets_the_level(obeyed, capsys):
    obeyed("POPTORCH_LOG_LEVEL", "DEBUG")
    assert shown_by(logs.backend, logging.DEBUG, capsys)
    assert not shown_by(logs.backend, logs.TRACE, capsys)


def test_the_back_ends_lines_go_where_the_variable_says(obeyed, tmp_path, capsys):
    log = tmp_path / "log.txt"
    obeyed("POPTORCH_LOG_DEST", str(log))
    logs.backend.warning("one")
    logs.python.warning("two")
    assert re.fullmatch(LINE % ("poptorch:cpp", "warning", "one"), log.read_text())
    assert re.fullmatch(LINE % ("poptorch::python", "warning", "two"), capsys.readouterr().err)


def test_the_back_ends_lines_can_go_to_stdout(obeyed, capsys):
    obeyed("POPTORCH_LOG_DEST", "stdout")
    logs.backend.warning("one")
    logs.python.warning("two")
    out, err = capsys.readouterr()
    assert (out.count("one"), err.count("two")) == (1, 1)
    assert (out.count("two"), err.count("one")) == (0, 0)


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("POPTORCH_LOG_LEVEL", "LOUD", "Unknown log level: LOUD.*DEBUG, ERR, INFO"),
        ("POPTORCH_LOG_DEST", "/no/such/folder/log", "No such file.*stderr, stdout"),
    ],
)
def test_a_wrong_variable_is_an_error_of_the_import(variable, value, allowed, monkeypatch):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=allowed) as caught:
        logs.obey_environment()
    assert f"{variable}={value}" in str(caught.value)


def test_of_a_syntax_error_the_log_has_one_line(caplog):
    report = logs._ReportUncaught(lambda *_: None)
    with pytest.raises(SyntaxError) as caught:
        compile("x = = 3", "script.py", "exec")
    report(caught.type, caught.value, caught.tb)
    assert [record.getMessage() for record in caplog.records] == ["SyntaxError: invalid syntax"]


def test_stderr_gets_it_from_python_alone(capsys):
    logs._ReportUncaught(lambda *_: print("printed", file=sys.stderr))(
        ValueError, ValueError("text"), None
    )
    assert capsys.readouterr().err == "printed\n"


def test_the_hook_that_was_there_is_called_and_ctrl_c_is_not_logged(caplog):
    seen = []
    report = logs._ReportUncaught(lambda *exception: seen.append(exception))
    for error in (KeyboardInterrupt(), ValueError("text")):
        report(type(error), error, None)
    assert [kind for kind, _, _ in seen] == [KeyboardInterrupt, ValueError]
    assert [record.getMessage() for record in caplog.records] == ["ValueError: text"]
    assert caplog.records[0].levelno == logging.CRITICAL
