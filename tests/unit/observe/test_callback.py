"""The output of a callback, line by line."""

import math

import pytest
import torch

from popsim_torch.errors import UsageTypeError
from popsim_torch.feeds import OutfeedMode, OutfeedQueue
from popsim_torch.observe import MaybeOutfeedQueue, OutfeedCallback, extended_table, summary_table

DATA = {"fc.weight_grad": torch.arange(6.0).view(2, 3), "fc.bias_grad": torch.ones(2, 1)}


@pytest.fixture
def queue(monkeypatch):
    queue = MaybeOutfeedQueue()
    monkeypatch.setattr(MaybeOutfeedQueue, "enqueued", True)
    monkeypatch.setattr(queue, "dequeue", lambda: DATA)
    return queue


def test_an_epoch(queue, capsys):
    OutfeedCallback(queue, name="Gradients callback").on_epoch_end(0)
    assert capsys.readouterr().out.split("\n") == [
        "",
        "Gradients callback",
        "key: fc.weight_grad shape: (2, 3)",
        "key: fc.bias_grad shape: (2, 1)",
        "Epoch 1 - Summary Stats",
        *summary_table(DATA).split("\n"),
        "",
    ]


def test_how_gradients_were_accumulated_stands_below(queue, capsys):
    queue.note = "Accumulated over 4 micro-batches: mean."
    OutfeedCallback(queue).on_epoch_end(2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "Accumulated over 4 micro-batches: mean."
    assert "Epoch 3 - Summary Stats" in lines


def test_the_newest_element_alone(monkeypatch, capsys):
    queue = MaybeOutfeedQueue(OutfeedMode.LAST)
    monkeypatch.setattr(MaybeOutfeedQueue, "enqueued", True)
    monkeypatch.setattr(queue, "poll", lambda: DATA, raising=False)
    OutfeedCallback(queue, "name").on_epoch_end(0)
    assert "key: fc.weight_grad shape: (2, 3)" in capsys.readouterr().out
    monkeypatch.setattr(queue, "poll", lambda: None, raising=False)
    OutfeedCallback(queue, "name").on_epoch_end(0)
    assert "No data enqueued" in capsys.readouterr().out


def test_a_queue_that_nobody_feeds(capsys):
    OutfeedCallback(MaybeOutfeedQueue(), "Single layer activations callback").on_epoch_end(0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["", "Single layer activations callback", "No data enqueued"]
    assert "is another queue fed" in lines[3]


def test_a_plain_queue_that_nobody_feeds(capsys):
    queue = OutfeedQueue()
    OutfeedCallback(queue, "name").on_epoch_end(0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["", "name", "No data enqueued"]
    assert lines[3:] == [queue.why_empty()] and "No compiled program enqueues" in lines[3]
    queue.close()
    OutfeedCallback(queue, "name").on_epoch_end(1)
    assert "closed before a program" in capsys.readouterr().out


def test_an_epoch_without_new_data(queue, monkeypatch, capsys):
    monkeypatch.setattr(queue, "dequeue", lambda: {"a": torch.empty(0, 3)})
    OutfeedCallback(queue, "name").on_epoch_end(0)
    assert capsys.readouterr().out.splitlines() == [
        "",
        "name",
        "No data enqueued",
        "Nothing has come since the queue was read last.",
    ]


@pytest.mark.parametrize(
    ("element", "key"),
    [(torch.ones(2), "0"), ((torch.ones(2),), "0"), ({"a": {"b": torch.ones(2)}}, "a/b")],
)
def test_elements_of_any_structure_have_names(queue, monkeypatch, capsys, element, key):
    monkeypatch.setattr(queue, "dequeue", lambda: element)
    OutfeedCallback(queue, "name").on_epoch_end(0)
    assert f"key: {key} shape: (2,)" in capsys.readouterr().out.splitlines()


def test_print_stats_prints_a_table(queue, capsys):
    OutfeedCallback(queue).print_stats(DATA)
    assert capsys.readouterr().out == summary_table(DATA) + "\n"


def test_the_extended_table_goes_where_it_is_wanted(queue):
    said = []
    OutfeedCallback(queue, extended=True, print_function=said.append).print_stats(DATA)
    assert said == [extended_table(DATA, steps=True)]


def test_what_is_not_finite_is_told_below_the_table(queue, capsys):
    values = torch.tensor([math.nan, 1e-7, 3e-7, math.inf])
    OutfeedCallback(queue).print_stats({"a": values, "b": torch.ones(2), "c": values[:1]})
    assert capsys.readouterr().out.splitlines()[4:] == [
        "a: 1 NaN and 1 infinite of 4; the others: mean 2e-07, std 1e-07, from 1e-07 to 3e-07.",
        "c: 1 NaN and 0 infinite of 1.",
    ]


def test_sinks_get_the_tensors_of_an_epoch(queue, capsys):
    calls = []

    class Sink:
        def write(self, *arguments):
            calls.append(arguments)

    OutfeedCallback(queue, "Gradients", sinks=[Sink(), Sink()]).on_epoch_end(2)
    assert calls == [("Gradients", 3, DATA)] * 2
    assert "Epoch 3 - Summary Stats" in capsys.readouterr().out


def test_nothing_goes_to_sinks_where_nothing_has_come(capsys):
    class Sink:
        def write(self, *_):
            raise AssertionError

    OutfeedCallback(MaybeOutfeedQueue(), sinks=[Sink()]).on_epoch_end(0)
    assert "No data enqueued" in capsys.readouterr().out


def test_something_else_is_no_sink(queue):
    with pytest.raises(UsageTypeError, match=r"a str is not a sink. Pass a poptorch.SummaryFile"):
        OutfeedCallback(queue, sinks=["stats.csv"])


def test_something_else_is_no_queue():
    with pytest.raises(UsageTypeError, match="got a list"):
        OutfeedCallback([])
