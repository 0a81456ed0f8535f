"""Checks inputs and outputs that are marked for overlap with computation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch.fx

from popsim_torch.enums import OverlapMode
from popsim_torch.errors import Error


@dataclass(frozen=True)
class OverlapMark:
    """A tensor that user code has marked.

    Attributes:
        source: The node of the tensor; None for one that is not traced.
        result: The node of the tensor to use instead from there on.
        mode: The overlap mode.
        for_input: Whether it is marked as an input; otherwise it is marked as an output.
    """

    source: torch.fx.Node | None
    result: torch.fx.Node | None
    mode: OverlapMode
    for_input: bool


def check_overlaps(
    marks: Iterable[OverlapMark],
    inputs: Sequence[torch.fx.Node],
    names: Sequence[str],
    outputs: Sequence[torch.fx.Node],
) -> None:
    """Check that marked tensors are inputs and outputs of the model, and are used as such.

    Args:
        marks: The marks, in the order of the calls.
        inputs: The nodes of the model's inputs.
        names: The names of the inputs.
        outputs: The nodes of the model's outputs.

    Raises:
        Error: A mark breaks a rule.
    """
    marks = list(marks)
    name_of = dict(zip(inputs, names, strict=True))
    for mark in marks:
        if mark.for_input and mark.source in name_of:
            others = [str(user.target) for user in mark.source.users if user is not mark.result]
            if others:
                raise Error(
                    "poptorch.set_overlap_for_input must be the only op applied to an input, but "
                    f"the input '{name_of[mark.source]}' is also used elsewhere "
                    f"({', '.join(others)}). Use what set_overlap_for_input returns everywhere."
                )
    for mark in marks:
        if not mark.for_input and list(outputs).count(mark.result) > 1:  # type: ignore[arg-type]
            raise Error(
                "A tensor marked with poptorch.set_overlap_for_output is returned twice. Return "
                "it once, or mark a copy of it as well."
            )
    for mark in marks:
        if mark.for_input and mark.source not in name_of:
            raise Error(
                "poptorch.set_overlap_for_input: the tensor is not a tensor input to the model, as "
                "passed to forward. Mark inputs before any other use."
            )
        if not mark.for_input and mark.result not in outputs:
            raise Error(
                "poptorch.set_overlap_for_output: the tensor is not a tensor output to the model. "
                "Return the result of set_overlap_for_output unchanged."
            )
