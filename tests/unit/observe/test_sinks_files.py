"""Records in CSV files and in files of JSON lines."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from popsim_torch.errors import UsageValueError
from popsim_torch.observe.record import Record
from popsim_torch.observe.sinks import SummaryFile
from popsim_torch.observe.sinks.rows import FIELDS
from popsim_torch.statistics import Channels, Statistics, statistics_of
from tests.unit.observe.made_records import record

ROOT = Path(__file__).parents[3]


def table(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def lines(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_a_row_for_each_record(tmp_path):
    sink = SummaryFile(tmp_path / "run.csv")
    first = record("fc1/Gemm:0", 7, [3.0, -4.0], micro_batch=2, replica=1, fingerprint=2**64 - 1)
    sink.write_records([first, record("w,\n", 8, [1.0])])
    sink.write_records([])
    sink.write_records([record("w", 9, [2.0])])
    sink.close()
    rows = table(sink.path)
    assert list(rows[0]) == list(FIELDS) and [row["step"] for row in rows] == ["7", "8", "9"]
    assert rows[0]["name"] == "fc1/Gemm:0" and rows[1]["name"] == "w,\n"
    assert (rows[0]["micro_batch"], rows[0]["replica"]) == ("2", "1")
    assert float(rows[0]["norm"]) == 5 and rows[0]["fingerprint"] == "f" * 16
    assert rows[1]["micro_batch"] == "" and rows[1]["fingerprint"] == ""


def test_columns_do_not_depend_on_what_was_asked_for(tmp_path):
    sink = SummaryFile(tmp_path / "run.csv")
    sink.write_records([Record("x", 0, None, 0, Statistics(4, 1, 2))])
    sink.write_records([record("x", 1, [np.nan])])
    rows = table(sink.path)
    assert (rows[0]["count"], rows[0]["nans"], rows[0]["infs"]) == ("4", "1", "2")
    assert rows[0]["mean"] == rows[1]["mean"] == "" and rows[1]["zeros"] == "0"


def test_a_line_of_json_has_everything(tmp_path):
    sink = SummaryFile(tmp_path / "run.jsonl")
    more = {
        "top_values": torch.tensor([math.inf, 2.0]),
        "top_positions": torch.tensor([5, 0]),
        "samples": torch.tensor([1.0, math.nan]),
    }
    sink.write_records([record("x", 3, [1.0, -1.5, np.inf, np.nan], **more)])
    sink.write_records([Record("x", 4, None, 0, Statistics(4, 0, 0))])
    full, bare = lines(sink.path)
    assert list(full)[: len(FIELDS)] == list(FIELDS) and list(full) == list(bare)
    assert full["top_values"] == ["inf", 2.0] and full["top_positions"] == [5, 0]
    assert full["samples"] == [1.0, "nan"]
    assert full["histogram"] == {
        "mantissa_bits": 0,
        "negative": {"127": 1},
        "positive": {"127": 1, "255": 2},
    }
    assert bare["histogram"] is None and bare["norm"] is None and bare["count"] == 4


def test_channels(tmp_path):
    found = statistics_of(torch.tensor([[0.0, math.inf], [0.0, 2.0]]), Channels())
    for name in ("run.csv", "run.jsonl"):
        SummaryFile(tmp_path / name).write_records([Record("x", 0, 1, 0, found)])
    assert table(tmp_path / "run.csv")[0]["dead_channels"] == "1"
    (line,) = lines(tmp_path / "run.jsonl")
    assert line["dead_channels"] == 1
    assert line["channels"] == {
        "count": 2,
        "zeros": [2, 0],
        "nans": [0, 0],
        "infs": [0, 1],
        "mean": [0, 2],
        "norm": [0, 2],
        "minimum": [0, 2],
        "maximum": [0, 2],
    }


def test_tensors_of_a_callback_and_records_do_not_mix_in_a_table(tmp_path):
    sink = SummaryFile(tmp_path / "run.csv")
    sink.write("Gradients", 1, {"x": torch.ones(2)})
    with pytest.raises(UsageValueError, match=r"run.csv' has other columns: .*name,epoch,key"):
        sink.write_records([record("x", 0, [1.0])])
    other = SummaryFile(tmp_path / "other.csv")
    other.write_records([record("x", 0, [1.0])])
    with pytest.raises(UsageValueError, match="go to different files"):
        other.write("Gradients", 1, {"x": torch.ones(2)})
    assert len(table(sink.path)) == len(table(other.path)) == 1


@pytest.mark.parametrize("name", ["run.csv", "run.jsonl"])
def test_an_unfinished_line_does_not_spoil_the_next_one(tmp_path, name):
    path = tmp_path / name
    SummaryFile(path).write_records([record("a", 0, [1.0])])
    with path.open("ab") as file:
        file.write(b"b,1" if name == "run.csv" else b'{"name": "b"')
    SummaryFile(path).write_records([record("c", 2, [1.0])])
    last = path.read_text().splitlines()[-1]
    assert last.startswith("c,2,") or json.loads(last)["name"] == "c"
    assert len(path.read_text().splitlines()) == (4 if name == "run.csv" else 3)


PROGRAM = """
import os, signal, sys
from popsim_torch.observe.sinks import SummaryFile
from tests.unit.observe.made_records import record
sink = SummaryFile(sys.argv[1])
for step in range(3):
    sink.write_records([record("x", step, [1.0])])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_all_records(tmp_path):
    path = tmp_path / "run.csv"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert [row["step"] for row in table(path)] == ["0", "1", "2"]
