"""How the trial of a call ends."""

from __future__ import annotations

from dataclasses import dataclass

NOTHING_TO_COMPARE = {
    "half complex": "complex numbers of half precision",
    "sparse": "sparse, quantised or nested tensors",
    "python": "no tensor is returned",
    "constant": "no gradient",
    "eager": "eager PyTorch refuses it",
    "empty": "tensors without values",
    "dynamic": "the values decide the shape",
}
"""Kinds of outcomes that say nothing about the device; the last two are the package's Error."""


@dataclass(frozen=True)
class Outcome:
    """How a trial ended.

    Attributes:
        kind: "works"; "error" for the package's Error; "raises" for another exception; "differs"
            for other results than eager PyTorch's; "crash" or "hang" of the process; or one of
            ``NOTHING_TO_COMPARE``.
        reason: What happened.
        known: Whether the trace had to know the values of integers.
        ops: The ops of the device, by name.
        foreign: PyTorch's operators that a file may not name.
    """

    kind: str
    reason: str = ""
    known: bool = False
    ops: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
