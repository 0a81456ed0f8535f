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
        region: Number of the part of forward whose values the backward pass is to rebuild
            (``torch.utils.checkpoint``), from 1; 0 outside of all.
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
"""The origin of ops that no line of the user's program asked for."""
