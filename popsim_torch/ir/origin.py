"""The origin of a node or an op in the user's program."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a node of a trace or of an op of a program.

    Attributes:
        scope: Path of the calling modules and the user's name scopes, ``layer1/0``; may be empty.
        stage: Pipeline stage of the call. An op may be on another one, see ``Op.stage``.
        backward: Whether it belongs to the backward pass of the call.
        op_type: The op type in the names of results, if it is not that of the operator.
        source: ``file:line`` of the user's code; empty if it is unknown.
        call: Number of the call, from 1; 0 if it belongs to no call.
        region: Number of the part of forward whose values the backward pass recomputes
            (``torch.utils.checkpoint``), from 1; 0 outside of all such parts.
        multi_conv: Number of the group of convolutions it belongs to, from 1; 0 for none.
    """

    scope: str = ""
    stage: int = 0
    backward: bool = False
    op_type: str | None = None
    source: str = ""
    call: int = 0
    region: int = 0
    multi_conv: int = 0


NOWHERE = Origin()
"""The origin of ops that do not belong to a line of the user's program."""
