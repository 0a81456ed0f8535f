"""Elements for queues of the host."""

from __future__ import annotations

from typing import Any

import torch.fx

from popsim_torch.dtypes import dtype_name, returned_dtype
from popsim_torch.ir import Phase
from popsim_torch.lowering.builder import Builder, Place, Value
from popsim_torch.lowering.rules.rule import Rule
from popsim_torch.trace.enqueues import ENQUEUE


def _enqueue(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    arguments: Any = node.args
    sources, key = arguments
    tensors = [builder.tensor(source) for source in sources]
    written = [found for x in tensors if (found := builder.written_in(x)) is not None]
    if any(phase == Phase.BACKWARD for phase, _ in written):
        place = Place(Phase.BACKWARD, place.stage, place.name, place.origin)
    builder.op(
        "enqueue",
        tensors,
        [],
        {"queue": int(key), "dtypes": [dtype_name(returned_dtype(x.dtype)) for x in tensors]},
        place=place,
        fixed_phase=True,
    )
    return None


RULES: dict[Any, Rule] = {ENQUEUE: Rule(_enqueue)}
