"""What a writer writes, a reader gives back."""

import json
import math
import sqlite3
from threading import Thread

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch.errors import UsageRuntimeError, UsageTypeError, UsageValueError
from popsim_torch.observe.record import Record, RecordSink
from popsim_torch.records import RecordedTensor, Run, RunWriter
from popsim_torch.statistics import Channels, Moments, Sample, Statistics, fitting, statistics_of
from tests.unit.records.runs import (
    ALL,
    TENSORS,
    assert_same,
    described,
    records_of_step,
    write_run,
)

CASES = {
    "usual": torch.randn(5, 7),
    "not finite": torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-40, 3.0]),
    "only NaN": torch.full((3,), math.nan),
    "empty": torch.zeros(0),
    "one": torch.tensor(2.5),
    "float16": torch.randn(9).half(),
    "integers": torch.tensor([2**31 - 1, -(2**31), 16777217, 0]),
    "large": torch.tensor([3e38, -3e38]),
}


def round_trip(folder, record):
    with RunWriter(folder / "a.popsim") as writer:
        writer.write_records([record])
    (found,) = Run(folder / "a.popsim").records()
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("requests", [(), ALL, *[(one,) for one in ALL]], ids=repr)
def test_statistics(case, requests, tmp_path):
    tensor = CASES[case]
    found = statistics_of(tensor, *fitting(requests, tensor.dim()))
    record = Record("x/y:0", 3, 2, 1, found)
    found = round_trip(tmp_path, record)
    place = (found.name, found.step, found.micro_batch, found.replica)
    assert Record(*place, record.statistics) == record
    assert_same(found.statistics, record.statistics)


def test_channels(tmp_path):
    x = torch.randn(5, 300).relu()
    x[:, 7], x[2, 8] = math.nan, math.inf
    for number, one in enumerate((x, x[:0], x[:, :0])):
        record = Record("x", 0, 0, 0, statistics_of(one, Channels()))
        found = round_trip(tmp_path / str(number), record).statistics
        assert_same(found, record.statistics)
        assert found.channels.mean.shape == (one.shape[1],)


FORMAT_1 = (
    "CREATE TABLE records (step INTEGER, micro_batch INTEGER, replica INTEGER, "
    "tensor INTEGER, asked INTEGER, count INTEGER, nans INTEGER, infs INTEGER, "
    "mean REAL, std REAL, minimum REAL, maximum REAL, norm REAL, absolute_mean REAL, "
    "zeros INTEGER, subnormals INTEGER, half_overflows INTEGER, half_underflows INTEGER, "
    "fingerprint INTEGER, samples BLOB, histogram BLOB, top BLOB)"
)


def test_a_run_of_the_first_format_is_read(tmp_path):
    """Before there were channels."""
    path = write_run(tmp_path / "a.popsim", requests=ALL[:-1])
    expected = Run(path).records()
    connection = sqlite3.connect(path / "index.sqlite")
    for statement in (
        "DROP INDEX places",
        "ALTER TABLE records RENAME TO newer",
        FORMAT_1,
        "ALTER TABLE newer DROP COLUMN channels",
        "INSERT INTO records SELECT * FROM newer",
        "DROP TABLE newer",
        "CREATE UNIQUE INDEX places ON records (step, tensor, micro_batch, replica)",
        "PRAGMA user_version = 1",
    ):
        connection.execute(statement)
    connection.commit()
    connection.close()
    run = Run(path)
    found = run.records()
    assert [one.name for one in found] == [one.name for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert_same(one.statistics, other.statistics)
    assert run.records(step=1, name="input")[0].statistics.channels is None
    assert run.steps == [0, 1, 2, 3]


@pytest.mark.parametrize("fingerprint", [0, 1, 2**63 - 1, 2**63, 2**64 - 1])
def test_fingerprints_have_64_bits(fingerprint, tmp_path):
    record = Record("x", 0, None, 0, Statistics(1, 0, 0, fingerprint=fingerprint))
    assert round_trip(tmp_path, record) == record


def test_a_single_statistic_may_be_there(tmp_path):
    record = Record("x", 0, None, 0, Statistics(3, 0, 0, norm=2.0, zeros=1))
    assert round_trip(tmp_path, record) == record


def test_a_run_says_what_it_has(tmp_path):
    meta = {"seed": 3, "lr": [0.5, None], "name": "ä"}
    run = Run(write_run(tmp_path / "a.popsim", meta=meta))
    assert (run.steps, run.names, run.state) == ([0, 1, 2, 3], list(TENSORS), "closed")
    assert run.meta == meta and run.versions["popsim_torch"] == poptorch.__version__
    assert run.created.startswith("20") and run.created.endswith("+00:00")
    assert list(run.details.values()) == described()
    assert len(run.records()) == 16
    assert [one.name for one in run.records(step=2)] == list(TENSORS)
    assert [one.step for one in run.records(name="input")] == [0, 1, 2, 3]
    (one,) = run.records(1, "fc1/Gemm:0")
    assert_same(one.statistics, list(records_of_step(1))[1].statistics)


def test_records_come_in_the_order_of_the_program(tmp_path):
    """Micro-batches one after another, the update at the end, whatever order they came in."""
    tensors = [RecordedTensor(name) for name in ("y", "x", "w")]
    places = [("w", None), ("x", 1), ("y", 1), ("x", 0), ("y", 0)]
    with RunWriter(tmp_path / "a", tensors=tensors) as writer:
        for replica in (1, 0):
            writer.write_records(
                [Record(name, 0, place, replica, Statistics(1, 0, 0)) for name, place in places]
            )
    found = [(one.micro_batch, one.name, one.replica) for one in Run(tmp_path / "a").records()]
    expected = [(0, "y"), (0, "x"), (1, "y"), (1, "x"), (None, "w")]
    assert found == [(*place, replica) for place in expected for replica in (0, 1)]


def test_tensors_without_records_are_known_and_not_named(tmp_path):
    path = write_run(tmp_path / "a", tensors=[RecordedTensor("never", (2,)), *described()])
    run = Run(path)
    assert "never" not in run.names and run.details["never"].shape == (2,)


def test_a_text_has_a_line_for_each_tensor(tmp_path):
    def spoil(step, name, tensor):
        return torch.full_like(tensor, math.nan) if name == "input" and step == 1 else tensor

    run = Run(write_run(tmp_path / "a.popsim", spoil))
    lines = str(run).splitlines()
    assert "steps 0 to 3, closed" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == ["Name", *TENSORS]
    assert lines[2].split()[-2:] == ["24", "0"] and "float32 (6, 4)" in lines[2]
    assert repr(run).endswith("a.popsim': 4 steps, 4 tensors, closed)")


def test_a_run_can_be_read_while_it_is_written(tmp_path):
    writer = RunWriter(tmp_path / "a")
    run = Run(tmp_path / "a")
    assert (run.steps, run.records(), run.state) == ([], [], "open")
    assert "no records, open" in str(run)
    for step in range(3):
        writer.write_records(list(records_of_step(step)))
        assert run.steps == list(range(step + 1))
    writer.close()
    writer.close()
    assert run.state == "closed"
    assert sorted(one.name for one in (tmp_path / "a").iterdir()) == ["index.sqlite", "tensors"]


def test_records_may_come_on_another_thread(tmp_path):
    writer: RecordSink = RunWriter(tmp_path / "a")
    threads = [
        Thread(target=lambda step=step: writer.write_records(list(records_of_step(step))))
        for step in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    assert len(Run(tmp_path / "a").records()) == 8 * len(TENSORS)


def test_whole_tensors(tmp_path):
    weight = torch.randn(3, 4)
    tensors = {
        "w": weight,
        "same": weight,
        "t": weight.t(),
        "h": weight.half(),
        "n": torch.ones(()),
    }
    with RunWriter(tmp_path / "a") as writer:
        writer.write_tensors(12, tensors)
        writer.write_tensors(2, {"w": weight + 1})
    run = Run(tmp_path / "a")
    assert run.tensor_steps == [2, 12] and run.steps == []
    found = run.tensors(12)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    with pytest.raises(UsageValueError, match=r"no whole tensors of step 3.*2 steps, from 2 to 12"):
        run.tensors(3)


def test_a_record_takes_about_200_bytes(tmp_path):
    path = write_run(tmp_path / "a", steps=500)
    size = (path / "index.sqlite").stat().st_size
    assert size / 2000 < 220


def test_a_limit_ends_the_recording_with_one_warning(tmp_path, caplog):
    limit = 100_000
    with RunWriter(tmp_path / "a", max_bytes=limit) as writer:
        for step in range(500):
            writer.write_records(list(records_of_step(step)))
        writer.write_tensors(1, {"x": torch.ones(1)})
    run = Run(tmp_path / "a")
    assert run.state == "full" and 50 < len(run.steps) < 200
    assert (tmp_path / "a" / "index.sqlite").stat().st_size <= limit
    assert run.tensor_steps == []
    warnings = [one.getMessage() for one in caplog.records]
    assert (
        len(warnings) == 1
        and "max_bytes=100000. It takes neither the records of step " in warnings[0]
    )


def test_whole_tensors_count_for_the_limit(tmp_path):
    with RunWriter(tmp_path / "a", max_bytes=100_000) as writer:
        for step in range(5):
            writer.write_tensors(step, {"x": torch.zeros(10_000)})
    assert Run(tmp_path / "a").tensor_steps == [0]


def test_an_index_is_a_usual_database(tmp_path):
    path = write_run(tmp_path / "a")
    connection = sqlite3.connect(path / "index.sqlite")
    rows = connection.execute(
        "SELECT step, norm FROM records JOIN tensors ON tensor = id WHERE name = 'input'"
    ).fetchall()
    connection.close()
    assert rows == [(one.step, one.statistics.norm) for one in Run(path).records(name="input")]


def test_wrong_arguments(tmp_path):
    with pytest.raises(UsageTypeError, match="7 is not a path"):
        RunWriter(7)
    with pytest.raises(UsageTypeError, match="7 is not a path"):
        Run(7)
    with pytest.raises(UsageTypeError, match="max_bytes is a str"):
        RunWriter(tmp_path / "a", max_bytes="1 GB")
    with pytest.raises(UsageValueError, match="must be positive, got 0"):
        RunWriter(tmp_path / "a", max_bytes=0)
    with pytest.raises(UsageTypeError, match=r"JSON cannot hold meta\['x'\]"):
        RunWriter(tmp_path / "a", meta={"x": torch.ones(1)})
    assert not (tmp_path / "a").exists()
    write_run(tmp_path / "a", requests=(Moments(), Sample()))
    with pytest.raises(poptorch.Error, match=r"there is a run already. Choose another folder"):
        RunWriter(tmp_path / "a")
    run = Run(tmp_path / "a")
    with pytest.raises(UsageValueError, match=r"no records of 'inputs'. Closest names: 'input'"):
        run.records(name="inputs")
    with pytest.raises(UsageValueError, match=r"no records of step 9. There are 4 steps, from 0"):
        run.records(step=9)


def test_histograms_may_be_left_out(tmp_path):
    run = Run(write_run(tmp_path / "a", requests=ALL, steps=1))
    for histograms in (True, False):
        (record,) = run.read_records({"name": "input"}, histograms=histograms)
        assert (record.statistics.histogram is not None) == histograms
        assert record.statistics.samples is not None
    with pytest.raises(UsageValueError, match="'replica' cannot choose records"):
        next(run.read_records({"replica": 0}))


def test_wrong_calls_of_a_writer(tmp_path):
    writer = RunWriter(tmp_path / "a")
    with pytest.raises(UsageValueError, match="the step -1 is not 0, 1, 2"):
        writer.write_tensors(-1, {})
    with pytest.raises(UsageTypeError, match="'x' is a float, and a tensor is needed"):
        writer.write_tensors(1, {"x": 1.0})
    records = list(records_of_step(0))
    writer.write_records(records)
    with pytest.raises(poptorch.Error, match=r"is there already.*a folder of its own for each run"):
        writer.write_records([*records_of_step(1), records[0]])
    writer.close()
    assert Run(tmp_path / "a").steps == [0]  # a transaction is written as a whole, or not at all
    for call in (lambda: writer.write_records(records), lambda: writer.write_tensors(1, {})):
        with pytest.raises(UsageRuntimeError, match="is closed"):
            call()


def test_meta_is_readable_by_others(tmp_path):
    path = write_run(tmp_path / "a", meta={"lr": 0.1})
    connection = sqlite3.connect(path / "index.sqlite")
    (text,) = connection.execute("SELECT value FROM meta WHERE key = 'lr'").fetchone()
    connection.close()
    assert json.loads(text) == 0.1
