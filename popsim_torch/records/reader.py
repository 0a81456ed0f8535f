"""Reads the folder of a run. The folder is not trusted: reading runs no code of it."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from popsim_torch.errors import (
    Error,
    UsageTypeError,
    UsageValueError,
    closest_names,
    listed_names,
)
from popsim_torch.observe.record import Record
from popsim_torch.records import schema
from popsim_torch.records.schema import State
from popsim_torch.records.tensors import RecordedTensor, tensor_of
from popsim_torch.records.text import run_text
from popsim_torch.records.writer import TENSORS, tensor_file

__all__ = ["Run"]

_MAGIC = b"SQLite format 3\0"
_WRONG_CONTENT = (ValueError, TypeError, KeyError, OverflowError, RecursionError)
_SELECT_TENSORS = "SELECT name, shape, dtype, module, kind, source FROM tensors {where}"
_NUM_FACTS = 4


class Run:
    """A run that a ``RunWriter`` has written, or is writing: each question reads the folder anew.

    ``print(run)`` shows a table of its tensors.

    Args:
        path: The folder.

    Raises:
        UsageTypeError: ``path`` is not a path.
        Error: There is no run, a newer version of the package wrote it, or its index is damaged.
            Every method and attribute raises it for a run that is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise UsageTypeError(f"Run: {path!r} is not a path. Pass the folder of a run.")
        self.path = Path(path)
        self._format = schema.FORMAT
        with self._reading("SELECT created, package, torch, state FROM runs") as rows:
            facts = list(rows)
            one_row = len(facts) == 1 and len(facts[0]) == _NUM_FACTS
            if not one_row or any(type(fact) is not str for fact in facts[0]):
                raise ValueError("it does not say when it was written")
        self.created: str = facts[0][0]
        """When the run began: date and time, UTC."""
        self.versions: dict[str, str] = {"popsim_torch": facts[0][1], "torch": facts[0][2]}
        """The versions that wrote it."""

    @property
    def state(self) -> str:
        """``closed``; ``full``, if it reached ``max_bytes``; or ``open``.

        An open run is being written, or its process was killed.
        """
        with self._reading("SELECT state FROM runs") as rows:
            (state,) = next(rows)
            if state not in (State.OPEN, State.CLOSED, State.FULL):
                raise ValueError(f"its state is {state!r:.100}")
            return str(state)

    @property
    def meta(self) -> dict[str, Any]:
        """What the writer was told to remember of the run."""
        with self._reading("SELECT key, value FROM meta") as rows:
            return {str(key): json.loads(value) for key, value in rows}

    @property
    def details(self) -> dict[str, RecordedTensor]:
        """All tensors that the run knows, by name, in the order of the program.

        Not all of them need to have records.
        """
        return {one.name: one for one in self._tensors("ORDER BY position")}

    @property
    def names(self) -> list[str]:
        """The names of the tensors with records, in the order of the program."""
        where = "WHERE id IN (SELECT DISTINCT tensor FROM records) ORDER BY position"
        return [one.name for one in self._tensors(where)]

    @property
    def steps(self) -> list[int]:
        """The steps with records, in order."""
        with self._reading("SELECT DISTINCT step FROM records ORDER BY step") as rows:
            steps = [step for (step,) in rows]
            if any(type(step) is not int for step in steps):
                raise ValueError("a step is not a number")
            return steps

    @property
    def tensor_steps(self) -> list[int]:
        """The steps with whole tensors, in order."""
        files = (self.path / TENSORS).glob("*.safetensors")
        return sorted(int(file.stem) for file in files if file.stem.isdecimal())

    def records(self, step: int | None = None, name: str | None = None) -> list[Record]:
        """Return records in order: steps, micro-batches, then as the program computes tensors.

        Args:
            step: The step; None for all steps.
            name: The name of the tensor; None for all tensors.

        Raises:
            UsageValueError: The run has no records of this step, or of this name.
        """
        chosen: dict[str, int | str] = {}
        if step is not None:
            chosen["step"] = step
        if name is not None:
            chosen["name"] = name
        found = list(self.read_records(chosen))
        if not found:
            self._check_chosen(step, name)
        return found

    def read_records(
        self, chosen: Mapping[str, int | str] | None = None, *, histograms: bool = True
    ) -> Iterator[Record]:
        """Yield records one after another, in the order of ``records``; for runs of any length.

        Args:
            chosen: The ``step``, the ``name``, or both; None for all records.
            histograms: Whether to read histograms, too, which takes most of the time.

        Raises:
            UsageValueError: Something else chooses records.
        """
        given = dict(chosen or {})
        if not given.keys() <= {"step", "name"}:
            raise UsageValueError(
                f"Run.read_records: {listed_names(given)} cannot choose records; pass 'step', "
                "'name', or both."
            )
        statement = schema.select_records(given, histograms=histograms, version=self._format)
        with self._reading(statement, given) as rows:
            yield from map(schema.record_of, rows)

    def tensors(self, step: int) -> dict[str, torch.Tensor]:
        """Return the whole tensors of a step, by name.

        Args:
            step: The device iteration, counted from 0.

        Raises:
            UsageValueError: The run has no tensors of this step.
            Error: The file is damaged, or cannot be read.
        """
        steps = self.tensor_steps
        if step not in steps:
            raise UsageValueError(
                f"{self.path}: there are no whole tensors of step {step!r}. {_which(steps)}"
            )
        path = tensor_file(self.path, step)
        try:
            return safetensors.torch.load(path.read_bytes())
        except OSError as error:
            raise Error(f"{path}: the file cannot be read ({error}).") from error
        # A file may name a dtype that this version of PyTorch does not have.
        except (safetensors.SafetensorError, RuntimeError, *_WRONG_CONTENT) as error:
            raise Error(
                f"{path}: the file is damaged ({error}). Use another copy, or record again."
            ) from error

    def __repr__(self) -> str:
        return (
            f"Run({str(self.path)!r}: {len(self.steps)} steps, {len(self.names)} tensors, "
            f"{self.state})"
        )

    def __str__(self) -> str:
        statement = (
            "SELECT name, shape, dtype, module, kind, source, count(*), sum(nans), sum(infs), "
            "max(step), mean, std, norm FROM records JOIN tensors ON tensor = id GROUP BY tensor "
            "ORDER BY position"
        )
        split = 6
        with self._reading(statement) as rows:
            found = [(tensor_of(row[:split]), row[split:]) for row in rows]
            return run_text(self, found)

    def _tensors(self, where: str) -> list[RecordedTensor]:
        with self._reading(_SELECT_TENSORS.format(where=where)) as rows:
            return [tensor_of(row) for row in rows]

    def _check_chosen(self, step: int | None, name: str | None) -> None:
        """Raise the error for a step or a name that the run does not have."""
        if name is not None and name not in self.names:
            near = listed_names(closest_names(name, self.names))
            hint = f"Closest names: {near}." if near else "run.names lists those with records."
            raise UsageValueError(f"{self.path}: there are no records of '{name}'. {hint}")
        steps = self.steps
        if step is not None and step not in steps:
            raise UsageValueError(
                f"{self.path}: there are no records of step {step!r}. {_which(steps)}"
            )

    @contextmanager
    def _reading(
        self, statement: str, values: Mapping[str, Any] | None = None
    ) -> Iterator[Iterator[Any]]:
        """Run a query on the checked file; errors of the file name it."""
        try:
            with closing(self._connect()) as connection:
                yield iter(connection.execute(statement, values or {}))
        except sqlite3.OperationalError as error:
            raise Error(
                f"{self.path}: the run cannot be read ({error}). Use another copy of the folder. "
                "If its process was killed, the first reading needs a writable folder."
            ) from error
        except (sqlite3.Error, *_WRONG_CONTENT) as error:
            raise self._refused(
                f"the run is damaged ({error}). Use another copy of the folder, or record again"
            ) from error

    def _connect(self) -> sqlite3.Connection:
        """Return a connection to a file that is what a writer of this version makes."""
        index = self.path / schema.INDEX
        try:
            if not stat.S_ISREG(os.stat(index).st_mode):  # opening a pipe would wait for a writer
                raise self._refused(f"{schema.INDEX} is not a regular file")
            with open(index, "rb") as file:
                if file.read(len(_MAGIC)) != _MAGIC:
                    raise self._refused(f"{schema.INDEX} is not a file of SQLite, or is damaged")
        except (OSError, ValueError) as error:
            raise self._refused(f"there is no run ({error})") from error
        connection = sqlite3.connect(f"{index.absolute().as_uri()}?mode=ro", uri=True)
        try:
            self._check(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _check(self, connection: sqlite3.Connection) -> None:
        """Refuse a file of another program, of a newer format, or with other tables."""
        for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "query_only = ON"):
            connection.execute(f"PRAGMA {pragma}")
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if application != schema.APPLICATION_ID:
            raise self._refused(f"{schema.INDEX} belongs to another program, or was never begun")
        if version > schema.FORMAT:
            raise self._refused(
                f"a newer version of popsim_torch wrote the run (format {version}, and this one "
                f"reads up to {schema.FORMAT}). Update popsim_torch",
                advice=False,
            )
        # Views and triggers could make a query do something else than it says.
        query = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"
        if dict(connection.execute(query)) != schema.TABLES.get(version):
            raise self._refused(f"{schema.INDEX} has other tables than a run")
        self._format = version

    def _refused(self, problem: str, *, advice: bool = True) -> Error:
        more = " Pass the folder that a RunWriter has written." if advice else ""
        return Error(f"{self.path}: {problem}.{more}")


def _which(steps: list[int]) -> str:
    if not steps:
        return "The run has none at all."
    return f"There are {len(steps)} steps, from {steps[0]} to {steps[-1]}."
