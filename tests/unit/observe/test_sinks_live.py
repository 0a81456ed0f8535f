"""The table on the terminal, and lines where there is none."""

import builtins
import io
import math
import re

import numpy as np
import pytest

from popsim_torch.errors import UsageValueError
from popsim_torch.observe.sinks import LiveTerminal
from popsim_torch.observe.sinks.texts import short_number, sparkline
from popsim_torch.queue_state import QueueState
from tests.unit.observe.made_records import record, training


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Let a test say what time it is."""
    now = [0.0]
    monkeypatch.setattr("popsim_torch.observe.sinks.live.time.monotonic", lambda: now[0])
    return now


def test_without_a_terminal_there_are_plain_lines(clock):
    stream = io.StringIO()
    sink = LiveTerminal(stream=stream)
    sink.write_records([record("fc1", 0, [3.0, 4.0]), record("fc2", 0, [1.0])])
    sink.close()
    assert stream.getvalue() == "step 0, 2 tensors; norm: fc1 5, fc2 1\n"


def test_there_is_at_most_a_line_per_second(clock):
    stream = io.StringIO()
    sink = LiveTerminal(stream=stream)
    for step in range(25):
        clock[0] = step / 10
        sink.write_records([record("x", step, [1.0])])
    assert [line.split(",")[0] for line in stream.getvalue().splitlines()] == [
        "step 0",
        "step 10",
        "step 20",
    ]
    sink.close()
    sink.close()
    assert stream.getvalue().splitlines()[3:] == ["step 24, 1 tensor; norm: x 1"]


def test_alarms_and_dropped_records_have_lines(clock):
    stream = io.StringIO()
    sink = LiveTerminal(stream=stream, statistic="mean")
    sink.write_records([record("good", 0, [1.0]), record("bad", 0, [1.0])])
    sink.write_records([record("bad", 1, [np.nan, 1.0])])
    sink.write_records([record("bad", 2, [np.nan, 1.0])])
    sink.records_dropped(7)
    sink.close()
    assert stream.getvalue().splitlines()[1:] == [
        "alarm at step 1: bad: 1 of 2 values are NaN",
        "step 2, 2 tensors, 1 alarm, 7 records dropped; mean: bad 1, good 1",
    ]


def test_many_alarms_and_many_tensors_are_counted(clock):
    stream = io.StringIO()
    sink = LiveTerminal(stream=stream)
    sink.write_records([record(f"x{place}", 0, [np.nan]) for place in range(12)])
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10 and lines[8] == "and 4 more alarms"
    assert lines[9].endswith("x3 nan, and 8 more")


def test_only_chosen_tensors_are_shown(clock):
    stream = io.StringIO()
    sink = LiveTerminal(["Gradient___*", "loss"], stream=stream)
    names = ("Gradient___fc.bias", "fc.bias", "loss")
    sink.write_records([record(name, 0, [2.0]) for name in names])
    assert stream.getvalue() == "step 0, 2 tensors; norm: Gradient___fc.bias 2, loss 2\n"
    nothing = io.StringIO()
    sink = LiveTerminal("none", stream=nothing)
    sink.write_records([record("x", 0, [2.0])])
    sink.close()
    assert nothing.getvalue() == ""


def test_chosen_tensors_are_shown_in_fit_too(clock):
    stream = io.StringIO()
    sink = LiveTerminal(["Gradient___fc*", "fc.bias"], stream=stream)
    names = ("Gradient___model.fc.bias", "model.fc.bias", "Reshape:0")
    sink.write_records([record(name, 0, [2.0]) for name in names])
    assert stream.getvalue() == (
        "step 0, 2 tensors; norm: Gradient___model.fc.bias 2, model.fc.bias 2\n"
    )


def test_names_cannot_control_the_terminal(clock):
    stream = io.StringIO()
    LiveTerminal(stream=stream).write_records([record("a\x1b[2Jb\n", 0, [np.nan])])
    assert "\x1b" not in stream.getvalue() and "a?[2Jb?" in stream.getvalue()


def test_a_stream_with_few_characters(clock):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    LiveTerminal(stream=stream).write_records([record("größe", 0, [1.0])])
    assert stream.buffer.getvalue() == b"step 0, 1 tensor; norm: gr??e 1\n"


def test_a_terminal_without_rich_gets_lines(clock, monkeypatch):
    found = builtins.__import__

    def without(name, *arguments):
        if name.split(".")[0] == "rich" or name.endswith("sinks.screen"):
            raise ImportError(name)
        return found(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    stream = Terminal()
    LiveTerminal(stream=stream).write_records([record("x", 0, [1.0])])
    assert stream.getvalue() == "step 0, 1 tensor; norm: x 1\n"


DATA = QueueState("InfeedQueue", 2, 3, 0, 0.0, 1.25)
SLOW = QueueState("DataLoader", 0, 4, 17, 3.14159, 0.0)
RESULTS = QueueState("OutfeedQueue train.py:7", 12, None, 0, 0.0, None)


def test_lines_say_how_full_queues_are(clock):
    stream = io.StringIO()
    sink = LiveTerminal(stream=stream)
    sink.show_queues([DATA, SLOW, RESULTS])
    assert stream.getvalue() == ""  # a line comes with records alone
    sink.write_records([record("x", 0, [1.0])])
    clock[0] = 10.0
    sink.show_queues([SLOW])
    sink.close()
    assert stream.getvalue() == (
        "step 0, 1 tensor; norm: x 1; queues: InfeedQueue 2/3, DataLoader 0/4 (program waited "
        "3.14 s (17x)), OutfeedQueue train.py:7 12\n"
    )


def shown(records, monkeypatch, width=140, height=40, queues=(), **arguments):
    """Return what stays on a terminal, and everything that was sent to it."""
    pytest.importorskip("rich", reason="rich is not installed")
    for name, value in (("TERM", "xterm"), ("COLUMNS", width), ("LINES", height)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    sink = LiveTerminal(stream=stream, **arguments)
    sink.show_queues(queues)
    sink.write_records(records)
    sink.close()
    sent = stream.getvalue()
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", sent)
    return drawn[drawn.rindex("tensor ") :], sent  # drawn again in the same place


def test_a_terminal_shows_a_table(monkeypatch):
    text, sent = shown(training(20, fault=10), monkeypatch)
    assert "\x1b[" in sent
    head, *rows = text.splitlines()
    words = ("tensor", "step", "mean", "std", "norm", "max", "norm over time", "alarms")
    places = [head.index(word) for word in words]
    assert places == sorted(places)
    (bad,) = [row for row in rows if row.startswith("Gradient___classifier.1.weight")]
    assert "NaN at 10 (10x)" in bad and "█" in bad and len(bad) <= 140
    assert "step 19, 15 tensors, 4 alarms" in text
    (first,) = [row for row in rows if row.startswith("features.0/Relu:0")]
    assert len(re.search("[▁▂▃▄▅▆▇█]+", first)[0]) == 20


def test_a_small_terminal_shows_tensors_with_alarms(monkeypatch):
    records = [record(f"x{place}", 0, [1.0]) for place in range(30)]
    records.append(record("[red]bad[/red]", 0, [np.nan]))
    text, _ = shown(records, monkeypatch, height=12)
    assert "[red]bad[/red]" in text and "x7" in text and "x8" not in text
    assert "22 tensors are not shown" in text
    assert len(text.splitlines()) <= 12


@pytest.mark.parametrize("width", [60, 80, 109, 110, 200])
def test_no_line_is_wider_than_the_terminal(monkeypatch, width):
    text, _ = shown(training(40, fault=20), monkeypatch, width=width)
    lines = text.splitlines()
    assert len(lines) == 17 and max(map(len, lines)) <= width
    (row,) = [line for line in lines if "NaN at 20" in line]
    assert row.startswith("Grad") and "1.weight" in row and "█" in row


def test_the_bars_show_the_last_steps(monkeypatch):
    records = [record("x", step, [float(step)]) for step in range(100)]
    text, _ = shown(records, monkeypatch, history=8, statistic="mean")
    assert "▁▂▃▄▅▆▇█" in text and "mean over time" in text


def test_a_terminal_is_not_drawn_more_often_than_it_can_be_seen(monkeypatch, clock):
    pytest.importorskip("rich", reason="rich is not installed")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    sink = LiveTerminal(stream=stream)
    sent = []
    for step in range(4):
        clock[0] = step * 0.1
        sink.write_records([record("x", step, [1.0])])
        sent.append(len(stream.getvalue()))
    sink.close()
    assert sent[0] == sent[1] == sent[2] < sent[3]


def queue_lines(text):
    """Return the lines of the table of queues, and the foot."""
    lines = text.splitlines()
    return lines[[line.startswith("queue") for line in lines].index(True) :]


def test_a_terminal_shows_queues_below_tensors(monkeypatch):
    text, _ = shown(training(3), monkeypatch, queues=[DATA, SLOW, RESULTS])
    head, data, slow, results, foot, *_ = queue_lines(text)
    titles = ["queue", "ready", "ready over time", "program waited", "producer waited"]
    assert re.split("  +", head.strip()) == titles
    assert data.split() == ["InfeedQueue", "2/3", "▆", "-", "1.25", "s"]
    assert slow.split() == ["DataLoader", "0/4", "▁", "3.14", "s", "(17x)", "-"]
    assert results.split() == ["OutfeedQueue", "train.py:7", "12", "█", "-", "-"]
    assert foot == "step 2, 15 tensors"


@pytest.mark.parametrize("width", [60, 75, 76, 110, 200])
def test_no_line_of_queues_is_wider_than_the_terminal(monkeypatch, width):
    long = QueueState("OutfeedQueue " + "very_" * 40 + "long.py:7", 3, 8, 1234, 1234.2, None)
    text, _ = shown(training(40), monkeypatch, width=width, queues=[long, DATA])
    lines = queue_lines(text)
    assert len(lines) == 4 and max(map(len, lines)) <= width
    assert "long.py:7" in lines[1] and "3/8" in lines[1] and "1234 s (1234x)" in lines[1]
    assert ("producer waited" in lines[0]) == (width >= 76)


def test_a_small_terminal_shows_a_part_of_the_queues(monkeypatch):
    queues = [QueueState(f"queue{number}", 0, 1, 0, 0.0, None) for number in range(9)]
    text, _ = shown(training(1), monkeypatch, height=12, queues=queues)
    assert queue_lines(text)[-1].endswith("; 6 queues not shown; 10 tensors are not shown")
    assert len(text.splitlines()) == 11
    text, _ = shown(training(1), monkeypatch, height=8, queues=queues)
    assert "queue0" not in text


def test_queues_are_drawn_while_the_program_waits(monkeypatch, clock):
    """No record comes meanwhile."""
    pytest.importorskip("rich", reason="rich is not installed")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    sink = LiveTerminal(stream=stream)
    sink.show_queues([DATA])
    assert stream.getvalue() == ""
    sink.write_records([record("x", 0, [1.0])])
    sent = []
    for ready in (2, 1, 1, 0):
        clock[0] += 0.15
        sink.show_queues([QueueState("InfeedQueue", ready, 3, 0, 0.0, 0.0)])
        sent.append(stream.getvalue())
    assert len(sent[0]) < len(sent[1]) == len(sent[2]) < len(sent[3])
    assert "▆▃▁" in sent[3] and "0/3" in sent[3]
    sink.close()


def test_names_of_queues_cannot_control_the_terminal(clock):
    stream = io.StringIO()
    sink = LiveTerminal(stream=stream)
    sink.show_queues([QueueState("a\x1b[2Jb", 1, 1, 0, 0.0, None)])
    sink.write_records([record("x", 0, [1.0])])
    assert stream.getvalue() == "step 0, 1 tensor; norm: x 1; queues: a?[2Jb 1/1\n"


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ([], ""),
        ([3.0, 3.0], "▁▁"),
        ([0.0, math.nan, 1.0, math.inf], "▁!█!"),
        ([-1.7e308, 0.0, 1.7e308], "▁▅█"),
    ],
)
def test_bars(values, bars):
    assert sparkline(values) == bars


def test_bars_of_a_span():
    assert sparkline([0, 1, 2, 3], span=(0, 3)) == "▁▃▆█"
    assert sparkline([2, 2], span=(0, 4)) == "▅▅"


def test_bars_of_ascii_and_numbers():
    assert sparkline([0.0, 1.0], ascii_only=True) == ".@"
    assert [short_number(one) for one in (None, 0.5, math.nan, 1e-9)] == [
        "-",
        "0.5",
        "nan",
        "1e-09",
    ]


def test_mistakes():
    with pytest.raises(
        UsageValueError, match="LiveTerminal: no statistic 'median'; there are mean"
    ):
        LiveTerminal(statistic="median")
    with pytest.raises(UsageValueError, match="history is 1 or more, got 0"):
        LiveTerminal(history=0)
