"""The tables of a run's ``index.sqlite``, and a record as a row of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from popsim_torch.observe.record import Record
from popsim_torch.records import blobs
from popsim_torch.statistics import Statistics

__all__ = [
    "APPLICATION_ID",
    "FORMAT",
    "INDEX",
    "INSERT_RECORD",
    "REPLACE_RECORD",
    "TABLES",
    "State",
    "record_of",
    "row_bytes",
    "row_of",
    "select_records",
]

INDEX = "index.sqlite"
"""The name of the file in the folder of a run."""
APPLICATION_ID = 0x706F7072
"""SQLite's mark of the program that a file belongs to."""
FORMAT = 2
"""The number of this format; a file says in which one it is."""


class State:
    """Whether more records may come."""

    OPEN = "open"
    CLOSED = "closed"
    FULL = "full"


_MOMENTS = ("mean", "std", "minimum", "maximum", "norm", "absolute_mean")
_COUNTS = ("zeros", "subnormals", "half_overflows", "half_underflows")
_NO_MICRO_BATCH = -1
_FINGERPRINT_BITS = 64
# Bit i of `asked` says whether field i is there. A field that is there and NULL is NaN, which
# SQLite does not store.
_OPTIONAL = (*_MOMENTS, *_COUNTS)

_CREATE = {
    "runs": "CREATE TABLE runs (created TEXT, package TEXT, torch TEXT, state TEXT)",
    "meta": "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT)",
    "tensors": (
        "CREATE TABLE tensors (id INTEGER PRIMARY KEY, position INTEGER, name TEXT UNIQUE, "
        "shape TEXT, dtype TEXT, module TEXT, kind TEXT, source TEXT)"
    ),
}
_CREATE_RECORDS = (
    "CREATE TABLE records (step INTEGER, micro_batch INTEGER, replica INTEGER, "
    "tensor INTEGER, asked INTEGER, count INTEGER, nans INTEGER, infs INTEGER, "
    f"{', '.join(f'{name} REAL' for name in _MOMENTS)}, "
    f"{', '.join(f'{name} INTEGER' for name in _COUNTS)}, "
    "fingerprint INTEGER, samples BLOB, histogram BLOB, top BLOB"
)
_CREATE_PLACES = "CREATE UNIQUE INDEX places ON records (step, tensor, micro_batch, replica)"


def _create(more: str) -> dict[str, str]:
    return {**_CREATE, "records": f"{_CREATE_RECORDS}{more})", "places": _CREATE_PLACES}


TABLES = {1: _create(""), FORMAT: _create(", channels BLOB")}
"""The statement that makes each table and index, by format. A file with any other is refused."""
_SINCE = {"channels": 2}
"""The format in which a column was added."""

_COLUMNS = (
    *("step", "micro_batch", "replica", "asked", "count", "nans", "infs", *_OPTIONAL),
    *("fingerprint", "samples", "histogram", "top", "channels"),
)
INSERT_RECORD = (
    f"INSERT INTO records (tensor, {', '.join(_COLUMNS)}) "
    f"VALUES ({', '.join('?' * (len(_COLUMNS) + 1))})"
)
REPLACE_RECORD = INSERT_RECORD.replace("INSERT", "INSERT OR REPLACE", 1)
_ORDER = "ORDER BY step, micro_batch = -1, micro_batch, position, replica"


def select_records(
    columns: Iterable[str] = (), *, histograms: bool = True, version: int = FORMAT
) -> str:
    """Return the query for records in the order of the program.

    Args:
        columns: Columns whose values choose records; the query has a parameter for each of them.
        histograms: Whether to read histograms.
        version: The format of the file.
    """
    left_out = {name for name, since in _SINCE.items() if since > version}
    if not histograms:
        left_out.add("histogram")
    where = " AND ".join(f"{column} = :{column}" for column in columns)
    read = ", ".join("NULL" if one in left_out else one for one in _COLUMNS)
    return (
        f"SELECT name, {read} FROM records JOIN tensors ON records.tensor = tensors.id "
        f"{'WHERE ' if where else ''}{where} {_ORDER}"
    )


# SQLite's own bytes in a row: its header, the row's number, and its place in the index.
_ROW_OVERHEAD = 48


def row_of(record: Record, tensor: int) -> tuple[Any, ...]:
    """Return a record as the row that ``INSERT_RECORD`` takes.

    Args:
        record: The record.
        tensor: The id of its tensor.
    """
    found = record.statistics
    optional = [getattr(found, name) for name in _OPTIONAL]
    asked = sum(1 << i for i, value in enumerate(optional) if value is not None)
    micro_batch = _NO_MICRO_BATCH if record.micro_batch is None else record.micro_batch
    top = None
    if found.top_values is not None and found.top_positions is not None:
        top = blobs.bytes_of_top(found.top_values, found.top_positions)
    return (
        *(tensor, record.step, micro_batch, record.replica),
        *(asked, found.count, found.nans, found.infs, *optional),
        None if found.fingerprint is None else _signed(found.fingerprint),
        None if found.samples is None else blobs.bytes_of_samples(found.samples),
        None if found.histogram is None else blobs.bytes_of_histogram(found.histogram),
        top,
        None if found.channels is None else blobs.bytes_of_channels(found.channels),
    )


def row_bytes(row: Sequence[Any]) -> int:
    """Return about how many bytes a row takes in the file."""
    sizes = (len(one) if isinstance(one, bytes) else 8 * isinstance(one, float) for one in row)
    return _ROW_OVERHEAD + 8 + sum(sizes)


def record_of(row: Sequence[Any]) -> Record:
    """Return the record in a row of ``select_records``.

    Raises:
        ValueError: The row is not as ``row_of`` makes it.
    """
    split = 8
    name, step, micro_batch, replica, asked, count, nans, infs = row[:split]
    numbers = (step, micro_batch, replica, asked, count, nans, infs)
    if type(name) is not str or any(type(number) is not int for number in numbers):
        raise ValueError("a record has no name, or something else than a count")
    if min(step, replica, asked, count, nans, infs) < 0 or micro_batch < _NO_MICRO_BATCH:
        raise ValueError("a record has a negative count")
    statistics: dict[str, Any] = {}
    for i, column in enumerate(_OPTIONAL):
        value = row[split + i]
        if asked >> i & 1:
            statistics[column] = _moment(value) if column in _MOMENTS else _count(value)
    fingerprint, samples, histogram, top, channels = row[split + len(_OPTIONAL) :]
    if fingerprint is not None:
        statistics["fingerprint"] = _integer(fingerprint) % (1 << _FINGERPRINT_BITS)
    if samples is not None:
        statistics["samples"] = blobs.samples_of(_bytes(samples))
    if histogram is not None:
        statistics["histogram"] = blobs.histogram_of(_bytes(histogram))
    if top is not None:
        values, positions = blobs.top_of(_bytes(top))
        statistics |= {"top_values": values, "top_positions": positions}
    if channels is not None:
        statistics["channels"] = blobs.channels_of(_bytes(channels))
    return Record(
        name,
        step,
        None if micro_batch == _NO_MICRO_BATCH else micro_batch,
        replica,
        Statistics(count, nans, infs, **statistics),
    )


def _signed(fingerprint: int) -> int:
    """Return 64 bits as the signed number that SQLite stores."""
    half = 1 << (_FINGERPRINT_BITS - 1)
    return (fingerprint + half) % (2 * half) - half


def _moment(value: Any) -> float:
    if value is None:
        return math.nan
    if type(value) not in (float, int):
        raise ValueError("a moment is not a number")
    return float(value)


def _count(value: Any) -> int:
    if _integer(value) < 0:
        raise ValueError("a count is negative")
    return int(value)


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise ValueError("something that counts is not an integer")
    return value


def _bytes(value: Any) -> bytes:
    if type(value) is not bytes:
        raise ValueError("an array is not bytes")
    return value
