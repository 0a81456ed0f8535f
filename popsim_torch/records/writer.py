"""Writes the records of a run to a folder, so that a killed process leaves a readable run."""

from __future__ import annotations

import datetime
import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from popsim_torch import logs
from popsim_torch.errors import Error, UsageRuntimeError, UsageTypeError, UsageValueError
from popsim_torch.files.whole_file import write_whole
from popsim_torch.observe.record import Record
from popsim_torch.records import schema
from popsim_torch.records.schema import State
from popsim_torch.records.tensors import DescribedTensor, RecordedTensor, row_of
from popsim_torch.version import __version__

__all__ = ["TENSORS", "RunWriter", "tensor_file"]

TENSORS = "tensors"
"""The folder of whole tensors, in the folder of a run."""

_INSERT_TENSOR = "INSERT INTO tensors VALUES (?, ?, ?, ?, ?, ?, ?, ?)"


def tensor_file(folder: Path, step: int) -> Path:
    """Return the file with the whole tensors of a step."""
    return folder / TENSORS / f"{step}.safetensors"


class RunWriter:
    """Writes a run: a folder with ``index.sqlite`` and with ``tensors/<step>.safetensors``.

    It is a sink: ``executor.add_sink(RunWriter("run.popsim"))``. Each call of ``write_records`` is
    one transaction. If the process is killed, the run has all calls that returned. ``Run`` reads
    the folder, also while it is written.

    A record takes about 200 bytes with moments, fingerprint and 16 samples; a histogram takes 100
    to 600 more, and channels up to 56 bytes each.

    Args:
        path: The folder, usually ``something.popsim``. It is made; it must not have a run.
        max_bytes: The size at which it stops, with one warning; what was written until then is
            kept. None for no limit. SQLite's journal, up to 4 MB while it writes, comes on top.
        meta: What to remember of the run, by name: values that JSON has.
        tensors: The tensors of the program in its order, such as ``executor.names()``: name, shape,
            dtype, module, kind, and source. Tensors that are only in records come behind them.

    Raises:
        UsageTypeError: An argument has the wrong type, or ``meta`` has a value that JSON has not.
        UsageValueError: ``max_bytes`` is not positive.
        Error: The folder has a run already, or cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int | None = None,
        meta: Mapping[str, Any] | None = None,
        tensors: Iterable[DescribedTensor] = (),
    ) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise UsageTypeError(f"RunWriter: {path!r} is not a path. Pass the path of a folder.")
        self.path = Path(path)
        self._max_bytes = _checked_limit(max_bytes)
        self._tensor_bytes = 0
        self._ids: dict[str, int] = {}
        self._state = State.OPEN
        self._lock = threading.RLock()  # records come on the thread of a reader
        texts = _meta_texts(meta or {})
        with self._failing():
            self.path.mkdir(parents=True, exist_ok=True)
            if (self.path / schema.INDEX).exists():
                raise Error(
                    f"{self.path}: there is a run already. Choose another folder, or remove this "
                    "one; processes that train together need a folder each."
                )
            (self.path / TENSORS).mkdir(exist_ok=True)
            self._connection = sqlite3.connect(self.path / schema.INDEX, check_same_thread=False)
            try:
                self._create(texts)
                self.describe(tensors)
            except BaseException:
                self._connection.close()
                raise

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RunWriter({str(self.path)!r}, {self._state})"

    def describe(self, tensors: Iterable[DescribedTensor]) -> None:
        """Say what tensors are, in the order of the program, before records of them are written.

        Args:
            tensors: Tensors with name, shape, dtype, module, kind and source. Those that the run
                knows already stay as they are.

        Raises:
            Error: The file cannot be written.
        """
        with self._lock, self._failing():
            self._require_open("describe")
            new = self._add_tensors(tensors)
            self._connection.commit()
            self._ids |= new

    def write_records(self, records: Sequence[Record], *, replace: bool = False) -> None:
        """Write records in one transaction: all of them, or none.

        Args:
            records: The records, in the order of the program.
            replace: Whether a record replaces an earlier one of the same step, micro-batch, replica
                and tensor, as when a device iteration runs again.

        Raises:
            Error: The file cannot be written, for example because the disk is full; or a record of
                this step, micro-batch, replica and tensor was written before, without ``replace``.
            UsageRuntimeError: The writer is closed.
        """
        with self._lock, self._failing():
            self._require_open("write_records")
            if self._state == State.FULL or not records:
                return
            new = self._add_tensors(RecordedTensor(one.name) for one in records)
            ids = self._ids | new
            rows = [schema.row_of(one, ids[one.name]) for one in records]
            if self._is_full(sum(map(schema.row_bytes, rows))):
                self._connection.rollback()
                self._stop(f"the records of step {records[0].step}")
                return
            statement = schema.REPLACE_RECORD if replace else schema.INSERT_RECORD
            self._connection.executemany(statement, rows)
            self._connection.commit()
            self._ids = ids

    def write_tensors(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write whole tensors of a step to a file, completely or not at all.

        Args:
            step: The device iteration, counted from 0. A file of this step is replaced.
            tensors: Tensors of any shape and dtype by name.

        Raises:
            UsageTypeError: A value is not a tensor.
            UsageValueError: The step is not an integer from 0 on.
            Error: The file cannot be written.
            UsageRuntimeError: The writer is closed.
        """
        if type(step) is not int or step < 0:
            raise UsageValueError(f"RunWriter.write_tensors: the step {step!r} is not 0, 1, 2, ...")
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):
                raise UsageTypeError(
                    f"RunWriter.write_tensors: '{name}' is a {type(tensor).__name__}, and a tensor "
                    "is needed."
                )
        with self._lock, self._failing():
            self._require_open("write_tensors")
            if self._state == State.FULL:
                return
            # Tensors that share memory, such as tied weights, are written once for each name.
            data = safetensors.torch.save(
                {name: one.detach().cpu().contiguous().clone() for name, one in tensors.items()}
            )
            if self._is_full(len(data)):
                self._stop(f"the tensors of step {step}")
                return
            write_whole(tensor_file(self.path, step), "tensors", lambda file: file.write(data))
            self._tensor_bytes += len(data)

    def close(self) -> None:
        """Finish the run; a second call does nothing.

        Raises:
            Error: The file cannot be written.
        """
        with self._lock, self._failing():
            if self._state == State.CLOSED:
                return
            try:
                if self._state == State.OPEN:
                    self._set_state(State.CLOSED)
                # One file is left, which can be read in a folder without write permission. While
                # another process reads the run, the journal stays.
                with suppress(sqlite3.OperationalError):
                    self._connection.execute("PRAGMA journal_mode = DELETE")
            finally:
                self._state = State.CLOSED
                self._connection.close()

    def _create(self, meta: Mapping[str, str]) -> None:
        """Make the tables and the first rows, in one transaction."""
        execute = self._connection.execute
        # With a write-ahead log a run can be read while it is written. Where the file system has
        # no shared memory, SQLite keeps its other journal, which a killed process leaves readable,
        # too.
        execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = NORMAL")
        execute("BEGIN IMMEDIATE")
        execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
        execute(f"PRAGMA user_version = {schema.FORMAT}")
        for statement in schema.TABLES[schema.FORMAT].values():
            execute(statement)
        created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        row = (created, __version__, torch.__version__, State.OPEN)
        execute("INSERT INTO runs VALUES (?, ?, ?, ?)", row)
        self._connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        self._connection.commit()

    def _add_tensors(self, tensors: Iterable[DescribedTensor]) -> dict[str, int]:
        """Add rows of tensors that the run does not know, and return their ids."""
        new: dict[str, int] = {}
        for tensor in tensors:
            if tensor.name not in self._ids and tensor.name not in new:
                number = len(self._ids) + len(new)
                self._connection.execute(_INSERT_TENSOR, (number, number, *row_of(tensor)))
                new[tensor.name] = number
        return new

    def _is_full(self, more: int) -> bool:
        if self._max_bytes is None:
            return False
        (pages,) = self._connection.execute("PRAGMA page_count").fetchone()
        (size,) = self._connection.execute("PRAGMA page_size").fetchone()
        # Rows may need two pages more than their bytes: one of the table, and one of its index.
        return bool((pages + 2) * size + self._tensor_bytes + more > self._max_bytes)

    def _stop(self, what: str) -> None:
        logs.python.warning(
            "RunWriter: %s has reached max_bytes=%s. It takes neither %s nor anything after them.",
            *(self.path, self._max_bytes, what),
        )
        self._set_state(State.FULL)

    def _set_state(self, state: str) -> None:
        self._connection.execute("UPDATE runs SET state = ?", (state,))
        self._connection.commit()
        self._state = state

    def _require_open(self, method: str) -> None:
        if self._state == State.CLOSED:
            raise UsageRuntimeError(
                f"RunWriter.{method}: {self.path} is closed. Make a RunWriter for another folder."
            )

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Undo what a failed call has begun, and name the folder in the error."""
        try:
            yield
        except BaseException as error:
            with suppress(AttributeError, sqlite3.Error):  # there may be no connection yet
                self._connection.rollback()
            if isinstance(error, sqlite3.IntegrityError):
                raise Error(
                    f"{self.path}: a record of this step, micro-batch, replica and tensor is there "
                    f"already ({error}). Use a folder of its own for each run."
                ) from error
            if isinstance(error, (sqlite3.Error, OSError, safetensors.SafetensorError)):
                raise Error(
                    f"{self.path}: the run cannot be written ({error}). What was written before is "
                    "unchanged. Is the disk full, or write-protected?"
                ) from error
            raise


def _checked_limit(max_bytes: Any) -> int | None:
    if max_bytes is None:
        return None
    if type(max_bytes) is not int:
        raise UsageTypeError(
            f"RunWriter: max_bytes is a {type(max_bytes).__name__}; pass a number of bytes, or "
            "None for no limit."
        )
    if max_bytes <= 0:
        raise UsageValueError(f"RunWriter: max_bytes must be positive, got {max_bytes}.")
    return max_bytes


def _meta_texts(meta: Mapping[str, Any]) -> dict[str, str]:
    texts = {}
    for key, value in meta.items():
        try:
            texts[str(key)] = json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageTypeError(
                f"RunWriter: JSON cannot hold meta['{key}'] ({error}). Pass text, numbers, and "
                "lists and dictionaries of them."
            ) from error
    return texts
