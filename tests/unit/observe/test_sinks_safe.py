"""A failing sink stops no training."""

import logging

import pytest

from popsim_torch.errors import UsageTypeError
from popsim_torch.observe.sinks import SafeSink
from tests.unit.observe.made_records import record

RECORDS = [record("x", 0, [1.0])]


class Failing:
    """Fails where it is told to."""

    def __init__(self, *where):
        self.where, self.calls = where, []

    def call(self, method):
        self.calls.append(method)
        if method in self.where:
            raise OSError("the disk is full")

    def write_records(self, records):
        self.call("write_records")

    def records_dropped(self, count):
        self.call("records_dropped")

    def close(self):
        self.call("close")


def use(sink, caplog):
    """Return the warnings of two calls of everything."""
    safe = SafeSink(sink)
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        for _ in range(2):
            safe.write_records(RECORDS)
            safe.records_dropped(3)
        safe.close()
        safe.close()
        safe.write_records(RECORDS)
    return safe, [line.getMessage() for line in caplog.records]


def test_a_sink_that_works_gets_everything(caplog):
    safe, warnings = use(Failing(), caplog)
    assert safe.sink.calls == ["write_records", "records_dropped"] * 2 + ["close"]
    assert warnings == [] and safe.error is None


@pytest.mark.parametrize("where", [("write_records",), ("write_records", "close")])
def test_a_sink_that_fails_warns_once_and_is_closed(where, caplog):
    safe, warnings = use(Failing(*where), caplog)
    assert safe.sink.calls == ["write_records", "close"]
    assert warnings == [
        "The sink Failing failed and gets no more records: OSError: the disk is full. "
        "The model keeps running."
    ]
    assert isinstance(safe.error, OSError)


def test_a_sink_that_fails_with_a_count_gets_no_more(caplog):
    safe, warnings = use(Failing("records_dropped"), caplog)
    assert safe.sink.calls == ["write_records", "records_dropped", "close"] and len(warnings) == 1


def test_a_sink_that_fails_with_queues_gets_no_more(caplog):
    class Watching(Failing):
        def show_queues(self, states):
            self.call("show_queues")

    assert not SafeSink(Failing()).shows_queues
    safe = SafeSink(Watching("show_queues"))
    assert safe.shows_queues
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        safe.show_queues([])
        safe.show_queues([])
    assert safe.sink.calls == ["show_queues", "close"] and len(caplog.records) == 1


def test_a_sink_that_fails_to_close(caplog):
    safe, warnings = use(Failing("close"), caplog)
    assert safe.sink.calls.count("close") == 1
    assert len(warnings) == 1 and "may not have written everything: OSError" in warnings[0]


def test_a_sink_without_a_count(caplog):
    class Plain:
        def write_records(self, records):
            self.records = records

        def close(self):
            pass

    safe, warnings = use(Plain(), caplog)
    assert safe.sink.records == RECORDS and warnings == []


def test_interrupts_pass_through():
    class Interrupted(Failing):
        def write_records(self, records):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SafeSink(Interrupted()).write_records(RECORDS)


def test_something_else_is_no_sink():
    with pytest.raises(UsageTypeError, match="a str has no method write_records"):
        SafeSink("stats.csv")
