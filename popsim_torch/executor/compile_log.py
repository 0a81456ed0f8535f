"""``CompileLog``: the steps of a compilation, the time and the result of each."""

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
        name: Name of the function that is the step, or of the pass.
        seconds: How long it took (s).
        made: The result in a few words; empty if there is nothing to count.
    """

    name: str
    seconds: float
    made: str = ""


class CompileLog:
    """The steps of one compilation, in order.

    Args:
        dump: Writes the result of each step as text.
    """

    def __init__(self, dump: Dump) -> None:
        self._dump = dump
        self._steps: list[CompileStep] = []
        self._last = time.perf_counter()

    def note(self, name: str, made: str = "", text: Callable[[], str] | None = None) -> None:
        """Record a step that has just ended; the next step begins now.

        Args:
            name: Name of the step.
            made: The result in a few words.
            text: Returns the full result as text; called only if the environment asks for a dump.
        """
        self._steps.append(CompileStep(name, time.perf_counter() - self._last, made))
        if text is not None and self._dump.on:
            self._dump.write(name, text())
        self._last = time.perf_counter()

    def close(self) -> None:
        """Dump the table of steps; no more steps follow."""
        if self._dump.on:
            self._dump.write("compile_log", f"{self}\n")

    @property
    def seconds(self) -> float:
        """The time that all steps took (s)."""
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
