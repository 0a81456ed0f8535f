"""Tables in Markdown, the line that describes the machine, and the common options."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
from collections.abc import Mapping, Sequence

import torch

import popsim_torch as poptorch
from benchmarks.common.cases import CASES, Case


def processor_name() -> str:
    """Return the processor's name as the system knows it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            facts = dict(
                (part.strip() for part in line.split(":", 1)) for line in file if ":" in line
            )
        return f"{facts['model name']} (family {facts['cpu family']}, model {facts['model']})"
    except (OSError, KeyError):
        return platform.processor() or "unknown processor"


def describe_machine() -> str:
    """Return the date, the machine, its other load, and the versions."""
    load = f", load {os.getloadavg()[0]:.1f} before" if hasattr(os, "getloadavg") else ""
    return (
        f"{datetime.date.today()}: {processor_name()}, {torch.get_num_threads()} of "
        f"{os.cpu_count()} cores{load}; Python {platform.python_version()}, "
        f"torch {torch.__version__}, popsim_torch {poptorch.__version__} "
        f"({poptorch.build_info().target})"
    )


class Table:
    """Prints one row at a time.

    Args:
        title: The title above the table.
        columns: Headings, with units.
        note: A note under the title: how to read the table.
    """

    def __init__(self, title: str, columns: Sequence[str], note: str = "") -> None:
        print(f"\n### {title}\n" + (f"\n{note}\n" if note else ""))
        self._num_columns = len(columns)
        self._print(columns)
        self._print(["---", *["---:"] * (len(columns) - 1)])

    def _print(self, cells: Sequence[str]) -> None:
        assert len(cells) == self._num_columns
        print("| " + " | ".join(cells) + " |", flush=True)

    def row(self, *cells: str | float) -> None:
        """Print a row; numbers get three significant digits."""
        self._print([cell if isinstance(cell, str) else three_digits(cell) for cell in cells])


def three_digits(value: float) -> str:
    """Return a number with three significant digits, large numbers as integers."""
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) < 0.0995 else f"{value:.{2 if abs(value) < 9.995 else 1}f}"


def verdict(ratio: float) -> str:
    """Return a verdict from the best rival's time divided by ours; 3 % are noise."""
    return "wins" if ratio > 1.03 else "loses" if ratio < 0.97 else "even"


def rival_columns(*, with_compile: bool) -> list[str]:
    """Return the headings of a table of eager PyTorch, torch.compile and this package."""
    if not with_compile:
        return ["case", "per call", "eager, ms", "ours, ms", "eager/ours", "ours"]
    return [
        "case",
        "per call",
        "eager, ms",
        "torch.compile, ms",
        "ours, ms",
        "eager/ours",
        "compile/ours",
        "ours",
    ]


def rival_row(
    table: Table, name: str, device_iterations: int, seconds: Mapping[str, float | None], *more: str
) -> None:
    """Print a row under ``rival_columns``.

    Args:
        table: The table.
        name: Name of the case.
        device_iterations: Device iterations per call.
        seconds: Times by contender: ``eager``, optionally ``compile``, and ``ours``. None: not
            measured.
        more: The cells of further columns.
    """
    ours = seconds["ours"]
    assert ours is not None
    theirs = [seconds[key] for key in ("eager", "compile") if key in seconds]
    table.row(
        name,
        str(device_iterations),
        *("-" if time is None else 1e3 * time for time in theirs),
        1e3 * ours,
        *("-" if time is None else time / ours for time in theirs),
        verdict(min(time / ours for time in theirs if time is not None)),
        *more,
    )


class _SelectCases(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option: str | None = None,
    ) -> None:
        found = [case for case in namespace.cases if str(values) in case.name]
        if not found:
            names = ", ".join(case.name for case in namespace.cases)
            parser.error(f"--only {values}: no such case; the cases are {names}")
        namespace.cases = found


def make_parser(
    description: str | None, rounds: int = 15, cases: Sequence[Case] = CASES
) -> argparse.ArgumentParser:
    """Return a parser with the options that every script has.

    Args:
        description: The script's docstring.
        rounds: Default of the option ``--rounds``.
        cases: The cases that ``--only`` can choose; the parsed ``cases`` are the chosen ones.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=rounds, help="turns of each contender")
    parser.add_argument(
        "--only", action=_SelectCases, help="measure cases whose name contains this"
    )
    parser.set_defaults(cases=list(cases))
    return parser
