"""Host calls."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch.fx

from popsim_torch.dtypes import dtype_name
from popsim_torch.host_call import HostCall
from popsim_torch.ir import Op
from popsim_torch.lowering.emit.builder import Builder, Place, Value
from popsim_torch.lowering.rules.rule import Rule
from popsim_torch.trace.host_calls import HOST_CALL, HOST_CALL_GRAD

_logger = logging.getLogger("poptorch::python")
_KIND = "host_call"


def _host_call(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    arguments: Any = node.args
    if node.target is HOST_CALL:
        operands, call, name, *_ = arguments
    else:
        gradients, inputs, random_state, call, name, _ = arguments
        operands = [*gradients, *inputs, random_state]
    results: Any = node.meta["val"]
    used = builder.used_results(node)
    outputs = [
        builder.value(result.dtype, result.shape) if i in used else None
        for i, result in enumerate(results)
    ]
    builder.op(
        _KIND,
        [builder.tensor(operand) for operand in operands],
        outputs,
        {
            "call": call,
            "id": name,
            "gradient": node.target is HOST_CALL_GRAD,
            "dtypes": [dtype_name(result.dtype) for result in results],
            "ranks": [result.dim() for result in results],
            "sizes": [int(size) for result in results for size in result.shape],
        },
        place=place,
        fixed_phase=True,
    )
    return outputs


def warn_of_calls_left_out(calls: Mapping[int, HostCall], ops: Iterable[Op]) -> None:
    """Warn of host calls that are not in the program, because their results are not used."""
    present = {op.attributes["call"] for op in ops if op.kind == _KIND}
    for number, call in calls.items():
        if number not in present:
            _logger.warning(
                "%s is not in the program: the model uses none of its results. Return one of "
                "them, or compute something from it.",
                call.shown,
            )


RULES: dict[Any, Rule] = {HOST_CALL: Rule(_host_call), HOST_CALL_GRAD: Rule(_host_call)}
