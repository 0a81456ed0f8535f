"""``CompileLog``: which steps a compilation had, how long each took, and what it made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from popsim_torch.executor.dump import Dump

__all__ = ["CompileLog", "CompileStep"]


@dataclass(frozen=True)
class CompileStep:
    """One step of a compilation.

    Attributes:
        name: Of the function that is the step, or of the pass.
        seconds: How long it took (s).
        made: What it made, in a few words; empty where there is nothing to count.
    """

    name: str
    seconds: float
    made: str = ""


class CompileLog:
    """The steps of one compilation, in their order.

    Args:
        dump: Takes the text of what a step has made.
    """

    def __init__(self, dump: Dump) -> None:
        self._dump = dump
        self._steps: list[CompileStep] = []
        self._last = time.perf_counter()

    def note(self, name: str, made: str = "", text: Callable[[], str] | None = None) -> None:
        """Take note of a step that has just ended; the next one begins now.

        Args:
            name: Of the step.
            made: What it made, in a few words.
            text: Returns that in full; asked for only where texts are dumped.
        """
        self._steps.append(CompileStep(name, time.perf_counter() - self._last, made))
        if text is not None and self._dump.on:
            self._dump.write(name, text())
        self._last = time.perf_counter()

    def close(self) -> None:
        """Dump the table: there will be no more steps."""
        if self._dump.on:
            self._dump.write("compile_log", f"{self}\n")

    @property
    def seconds(self) -> float:
        """How long all steps took (s)."""
        return sum(step.seconds for step in self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[CompileStep]:
        return iter(self._steps)

    def __str__(self) -> str:
        width = max([len(step.name) for step in self._steps], default=4)
        lines = [f"{'step':{width}} {'ms':>9}  made"]
        lines += [
            f"{step.name:{width}} {step.seconds * 1e3:9.2f}  {step.made}".rstrip()
            for step in self._steps
        ]
        return "\n".join([*lines, f"{'all':{width}} {self.seconds * 1e3:9.2f}"])
