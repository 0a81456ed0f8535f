"""Killed writers, full disks, and files that are damaged, foreign or hostile."""

import os
import pickle
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import popsim_torch as poptorch
from popsim_torch.records import Run, RunWriter, compare
from popsim_torch.records.schema import FORMAT, INSERT_RECORD, TABLES
from popsim_torch.statistics import Histogram, Moments, TopK
from tests.unit.records.runs import ALL, TENSORS, records_of_step, write_run

ROOT = Path(__file__).parents[3]

WRITE = """
import itertools, sys
from popsim_torch.records import RunWriter
from tests.unit.records.runs import records_of_step, described
import torch

writer = RunWriter(sys.argv[1], tensors=described())
for step in itertools.count():
    writer.write_records(list(records_of_step(step)))
    if step % 10 == 0:
        writer.write_tensors(step, {"x": torch.full((100_000,), float(step))})
    print(step, flush=True)
"""


def start(program, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_killed_process_leaves_all_steps_that_were_written(tmp_path):
    path = tmp_path / "a.popsim"
    with start(WRITE, path) as process:
        for line in process.stdout:
            if int(line) == 30:
                break
        time.sleep(random.Random(os.getpid()).uniform(0, 0.05))  # anywhere in a step
        process.send_signal(signal.SIGKILL)
        told = [int(line) for line in process.stdout]
    last = told[-1] if told else 30
    run = Run(path)
    # A step may be written that the process could not tell of any more.
    assert run.state == "open" and run.steps in ([*range(last + 1)], [*range(last + 2)])
    assert [len(run.records(step=step)) for step in run.steps] == [len(TENSORS)] * len(run.steps)
    for step in run.tensor_steps:
        assert torch.equal(run.tensors(step)["x"], torch.full((100_000,), float(step)))
    assert run.tensor_steps[:4] == [0, 10, 20, 30]
    assert compare(run, run).equal


FILL = """
import resource, sys
from popsim_torch.errors import Error
from popsim_torch.records import RunWriter
from tests.unit.records.runs import records_of_step

resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
writer = RunWriter(sys.argv[1])
for step in range(10_000):
    try:
        writer.write_records(list(records_of_step(step)))
    except Error as error:
        print(step)
        print(error.message)
        break
"""


def test_a_full_disk_is_an_error_and_leaves_what_was_written(tmp_path):
    with start(FILL, tmp_path / "a") as process:
        step, message = process.communicate(timeout=120)[0].strip().split("\n")
    assert "the run cannot be written" in message and "Is the disk full" in message
    assert Run(tmp_path / "a").steps == list(range(int(step))) and int(step) > 10


def test_a_writer_whose_disk_was_full_goes_on(tmp_path):
    with RunWriter(tmp_path / "a") as writer:
        connection = writer._connection
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(poptorch.Error, match=r"a: the run cannot be written .*full"):
            for step in range(1000):
                writer.write_records(list(records_of_step(step)))
        connection.execute("PRAGMA max_page_count = 100000")
        writer.write_records(list(records_of_step(2000)))
    assert Run(tmp_path / "a").steps == [*range(step), 2000]


def refuse(path, match):
    with pytest.raises(poptorch.Error, match=match) as caught:
        Run(path)
    assert str(path) in caught.value.message


def test_what_is_no_run(tmp_path):
    refuse(tmp_path / "none", "there is no run .*Pass the folder that a RunWriter has written")
    (tmp_path / "file").write_text("x")
    refuse(tmp_path / "file", "there is no run")
    refuse(tmp_path, "there is no run")
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "index.sqlite").write_bytes(pickle.dumps(print) * 100)
    refuse(folder, "is not a file of SQLite, or is damaged")
    (folder / "index.sqlite").unlink()
    sqlite3.connect(folder / "index.sqlite").close()
    refuse(folder, "is not a file of SQLite")
    os.mkfifo(tmp_path / "pipe")
    (folder / "index.sqlite").unlink()
    (folder / "index.sqlite").symlink_to(tmp_path / "pipe")
    refuse(folder, "is not a regular file")


def changed(tmp_path, *statements):
    """Return the folder of a run whose database was changed."""
    path = write_run(tmp_path / "a.popsim", requests=ALL)
    connection = sqlite3.connect(path / "index.sqlite")
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()
    return path


@pytest.mark.parametrize(
    ("statement", "match"),
    [
        ("PRAGMA application_id = 7", "belongs to another program"),
        ("PRAGMA user_version = 3", r"a newer version .*format 3.*reads up to 2.* Update"),
        ("PRAGMA user_version = 1", "other tables than a run"),
        ("PRAGMA user_version = 0", "other tables than a run"),
        ("CREATE TABLE more (x)", "other tables than a run"),
        ("CREATE VIEW more AS SELECT 1", "other tables than a run"),
        (
            "CREATE TRIGGER t AFTER INSERT ON records BEGIN SELECT 1; END",
            "other tables than a run",
        ),
        ("ALTER TABLE records ADD COLUMN more", "other tables than a run"),
        ("DROP TABLE meta", "other tables than a run"),
        ("DELETE FROM runs", "the run is damaged .*does not say when"),
        ("UPDATE runs SET created = x'00'", "the run is damaged"),
    ],
)
def test_a_database_of_another_form(statement, match, tmp_path):
    refuse(changed(tmp_path, statement), match)


def test_a_view_in_the_place_of_a_table(tmp_path):
    path = changed(tmp_path, "DROP TABLE records", "CREATE VIEW records AS SELECT * FROM tensors")
    refuse(path, "other tables than a run")


READERS = {
    "records": lambda run: run.records(),
    "names": lambda run: run.names,
    "details": lambda run: run.details,
    "meta": lambda run: run.meta,
    "state": lambda run: run.state,
    "steps": lambda run: run.steps,
    "text": str,
    "compare": lambda run: compare(run, run),
}


@pytest.mark.parametrize(
    ("statement", "readers"),
    [
        ("UPDATE records SET count = 'many'", ["records", "compare"]),
        ("UPDATE records SET nans = -1", ["records"]),
        ("UPDATE records SET step = 'x' WHERE step = 0", ["records", "steps"]),
        ("UPDATE records SET step = -1 WHERE step = 0", ["records"]),
        ("UPDATE records SET micro_batch = -2", ["records"]),
        ("UPDATE records SET mean = 'x'", ["records", "text"]),
        ("UPDATE records SET zeros = -3", ["records"]),
        ("UPDATE records SET fingerprint = 1.5", ["records"]),
        ("UPDATE records SET samples = x'7a00'", ["records"]),
        ("UPDATE records SET samples = 'text'", ["records"]),
        ("UPDATE records SET samples = x'6600'", ["records"]),
        ("UPDATE records SET samples = zeroblob(1000000)", ["records"]),
        ("UPDATE records SET top = x'00'", ["records"]),
        ("UPDATE records SET top = zeroblob(1600)", ["records"]),
        ("UPDATE records SET channels = 7", ["records"]),
        ("UPDATE records SET channels = x'01'", ["records"]),
        (f"UPDATE records SET channels = x'{'ff' * 16}'", ["records"]),
        (f"UPDATE records SET channels = x'{'7f' * 16}789c'", ["records"]),
        (f"UPDATE records SET channels = x'{'01' + '00' * 15}1234567890'", ["records"]),
        ("UPDATE records SET histogram = x''", ["records"]),
        ("UPDATE records SET histogram = x'0901'", ["records"]),
        ("UPDATE records SET histogram = x'0101'", ["records"]),
        ("UPDATE tensors SET name = x'00' WHERE id = 0", ["records", "names", "details"]),
        ("UPDATE tensors SET name = CAST(x'ff' AS TEXT) WHERE id = 0", ["records", "names"]),
        ("UPDATE tensors SET shape = '[-1]'", ["details", "text"]),
        ("UPDATE tensors SET shape = '{'", ["details"]),
        ("UPDATE tensors SET dtype = 'nn'", ["details"]),
        ("UPDATE meta SET value = '['", ["meta"]),
        ("UPDATE runs SET state = 'x'", ["state", "text"]),
    ],
)
def test_hostile_values(statement, readers, tmp_path):
    path = write_run(tmp_path / "a.popsim", requests=ALL, meta={"lr": 1})
    connection = sqlite3.connect(path / "index.sqlite")
    connection.execute(statement)
    connection.commit()
    connection.close()
    run = Run(path)
    for reader in readers:
        with pytest.raises(poptorch.Error, match=r"a\.popsim: the run ") as caught:
            READERS[reader](run)
        assert "Use another copy" in caught.value.message


def test_a_histogram_that_would_fill_the_memory(tmp_path):
    import zlib

    bomb = b"\x01" + zlib.compress(bytes(100_000_000))
    path = changed(tmp_path, f"UPDATE records SET histogram = x'{bomb.hex()}'")
    with pytest.raises(poptorch.Error, match="a histogram of another size"):
        Run(path).records()


def test_the_statements_of_the_schema_make_what_a_writer_makes(tmp_path):
    path = write_run(tmp_path / "a", steps=1)
    connection = sqlite3.connect(path / "index.sqlite")
    query = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"
    assert dict(connection.execute(query)) == TABLES[FORMAT]
    columns = [row[1] for row in connection.execute("PRAGMA table_info(records)")]
    connection.close()
    assert sorted(columns) == sorted(INSERT_RECORD.partition("(")[2].partition(")")[0].split(", "))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the bytes of a database."""
    path = write_run(
        tmp_path_factory.mktemp("whole") / "a", requests=(Moments(), Histogram(), TopK(2))
    )
    return (path / "index.sqlite").read_bytes()


def read_all(folder):
    """Read everything of a run; return whether it is damaged."""
    try:
        run = Run(folder)
        for reader in READERS.values():
            reader(run)
    except poptorch.Error as error:
        assert str(folder) in error.message
        return True
    return False


def test_a_truncated_file(whole, tmp_path):
    found = []
    for share in range(20):
        folder = tmp_path / str(share)
        folder.mkdir()
        (folder / "index.sqlite").write_bytes(whole[: len(whole) * share // 20])
        found.append(read_all(folder))
    assert found == [True] * 20


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_changed_bytes_are_data_or_an_error(whole, tmp_path, data):
    changed_bytes = bytearray(whole)
    places = st.integers(0, len(whole) - 1)
    for place, byte in data.draw(st.dictionaries(places, st.integers(0, 255), max_size=30)).items():
        changed_bytes[place] = byte
    folder = tmp_path / "fuzzed"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "index.sqlite").write_bytes(changed_bytes)
    assert read_all(folder) in (True, False)


@pytest.mark.parametrize("spoil", [lambda data: data[:-5], lambda data: b"\xff" * 8 + data[8:]])
def test_a_damaged_file_of_tensors(spoil, tmp_path):
    with RunWriter(tmp_path / "a") as writer:
        writer.write_tensors(3, {"x": torch.ones(5)})
    file = tmp_path / "a" / "tensors" / "3.safetensors"
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(poptorch.Error, match=r"3.safetensors: the file is damaged"):
        Run(tmp_path / "a").tensors(3)


def test_other_files_among_the_tensors_are_no_tensors(tmp_path):
    with RunWriter(tmp_path / "a") as writer:
        writer.write_tensors(3, {"x": torch.ones(5)})
    for name in ("x.safetensors", "-1.safetensors", ".tensors.0.writing", "4.txt"):
        (tmp_path / "a" / "tensors" / name).write_text("x")
    assert Run(tmp_path / "a").tensor_steps == [3]
