"""Where in the user's program something comes from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node of a trace or an op of a program comes from.

    Attributes:
        scope: Path of the modules being called and of user name scopes, ``layer1/0``; may be empty.
        stage: Pipeline stage of the call. An op may end up on another one, see ``Op.stage``.
        backward: It belongs to the backward pass of the call.
        op_type: The type that results are named by, where it is not that of the operator.
        source: ``file:line`` of the user's code, empty when unknown.
        call: Number of the call, from 1; 0 for what no call asked for.
    """

    scope: str = ""
    stage: int = 0
    backward: bool = False
    op_type: str | None = None
    source: str = ""
    call: int = 0


NOWHERE = Origin()
"""Of what no line of the user's program asked for."""
