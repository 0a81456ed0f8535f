"""Statistics in files, and in TensorBoard."""

import csv
import json
import math

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch.errors import UsageTypeError, UsageValueError
from popsim_torch.observe import summarise
from popsim_torch.observe.sinks import SummaryBoard, SummaryFile

DATA = {
    "fc.weight_grad": torch.arange(6.0).view(2, 3),
    "loss": torch.tensor([1.0, math.nan, math.inf, 0.0]),
}


def jsonl(path):
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def table(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_line_for_each_tensor_and_epoch(tmp_path):
    path = tmp_path / "stats.jsonl"
    for epoch in (1, 2):
        SummaryFile(path).write("Gradients", epoch, DATA)  # files are continued
    records = jsonl(path)
    assert [(one["epoch"], one["key"]) for one in records] == [
        (epoch, key) for epoch in (1, 2) for key in DATA
    ]
    first = records[0]
    found = summarise(DATA["fc.weight_grad"], (0.01, 0.5, 0.99))
    assert first["name"] == "Gradients" and first["shape"] == [2, 3] and first["count"] == 6
    for figure in ("mean", "std", "minimum", "maximum", "norm", "zeros", "nans", "infs"):
        assert first[figure] == getattr(found, figure)
    assert first["quantile_0.5"] == 2.5 and first["quantile_0.99"] == found.quantiles[0.99]


def test_what_is_not_finite_is_counted(tmp_path):
    path = tmp_path / "stats.jsonl"
    SummaryFile(str(path)).write("n", 1, DATA)
    last = jsonl(path)[-1]
    assert last["mean"] is None and last["norm"] is None
    assert (last["nans"], last["infs"], last["zeros"]) == (1, 1, 1)


def test_a_table(tmp_path):
    path = tmp_path / "stats.csv"
    sink = SummaryFile(path)
    sink.write("n", 1, {})
    for epoch in (1, 2):
        sink.write('a "name", with a comma', epoch, DATA)
    rows = table(path)
    assert len(rows) == 4 and path.read_text().count("quantile_0.5") == 1
    assert rows[0]["shape"] == "2x3" and float(rows[0]["mean"]) == 2.5
    assert rows[1]["mean"] == "" and rows[1]["nans"] == "1"
    assert rows[2]["name"] == 'a "name", with a comma' and rows[2]["epoch"] == "2"


def test_a_program_writes_a_file(tmp_path):
    path = tmp_path / "losses.csv"
    queue = poptorch.OutfeedQueue()
    callback = poptorch.OutfeedCallback(
        queue, "Losses", print_function=lambda _: None, sinks=[poptorch.SummaryFile(path)]
    )

    @poptorch.function
    def run():
        poptorch.repeat(4, lambda x: (x + 1, queue.enqueue({"x": x})), 0.0)

    for epoch in range(3):
        run()
        callback.on_epoch_end(epoch)
    assert [(row["epoch"], row["key"], float(row["mean"])) for row in table(path)] == [
        ("1", "x", 1.5),
        ("2", "x", 1.5),
        ("3", "x", 1.5),
    ]


class Writer:
    def __init__(self):
        self.scalars, self.histograms = {}, []

    def add_scalar(self, tag, value, step):
        self.scalars[tag, step] = value

    def add_histogram(self, tag, values, step):
        self.histograms.append((tag, values.numel(), step))


def test_tensorboard():
    writer = Writer()
    SummaryBoard(writer).write("Gradients", 3, DATA)
    found = summarise(DATA["fc.weight_grad"])
    assert writer.scalars["Gradients/fc.weight_grad/mean", 3] == found.mean
    assert writer.scalars["Gradients/fc.weight_grad/norm", 3] == found.norm
    assert len(writer.scalars) == 6 and math.isnan(writer.scalars["Gradients/loss/std", 3])
    assert writer.histograms == [("Gradients/fc.weight_grad", 6, 3)]


@pytest.mark.parametrize("name", ["stats.txt", "stats", ".csv"])
def test_other_endings(tmp_path, name):
    with pytest.raises(UsageValueError, match=r"ends with neither .csv nor .jsonl"):
        SummaryFile(tmp_path / name)


def test_mistakes(tmp_path):
    with pytest.raises(UsageTypeError, match="7 is not a path"):
        SummaryFile(7)
    with pytest.raises(FileNotFoundError):
        SummaryFile(tmp_path / "nowhere" / "stats.csv")
    with pytest.raises(UsageTypeError, match="a str has no method add_scalar"):
        SummaryBoard("runs")
