"""Loops and branches: ops that run bodies."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from popsim_torch.reference.call import Call, op
from popsim_torch.reference.draws import mix_seed

_ITERATION = 0x74726970  # iterations have other step numbers than micro-batches


@op
def loop(call: Call, *values: Tensor) -> list[Tensor]:
    """Run a body iteration by iteration.

    The inputs are the carried values, tensors of which each iteration gets one slice, and tensors
    that all iterations get. The results are the carried values after the last iteration, and the
    body's further results of all iterations, stacked.
    """
    count, carried = call["count"], call["carried"]
    sliced = call.get("sliced", 0)
    now = [_of(call, i) for i in range(carried)]
    slices = [_of(call, i) for i in range(carried, carried + sliced)]
    whole = [_of(call, i) for i in range(carried + sliced, len(values))]
    positions = list(range(count))[:: -1 if call.get("reverse", False) else 1]
    stacks: dict[int, list[Tensor]] = {}
    at = call.run.position
    for position in positions:
        if call.get("conditional", False) and not bool(now[0]):
            break
        inputs = [*now, *(x[position] for x in slices), *whole]
        iteration = replace(at, step=mix_seed(_ITERATION, position, at.step))
        results = call.run_body(call.op.bodies[0], inputs, iteration)
        now, stacks[position] = results[:carried], results[carried:]
    if not stacks:
        return [*now, *_empty_stacks(call, carried)]
    columns = zip(*(stacks[position] for position in sorted(stacks)), strict=True)
    return [*now, *(torch.stack(column) for column in columns)]


def _empty_stacks(call: Call, carried: int) -> list[Tensor]:
    """Return the stacks of a loop without iterations."""
    body = call.op.bodies[0]
    stacked = [body.tensors[i] for i in body.ops[-1].inputs[carried:]]
    return [torch.empty((0, *one.shape), dtype=call.run.held(one.dtype)) for one in stacked]


def _of(call: Call, position: int) -> Tensor:
    value = call.stored[position]
    assert value is not None
    return value


@op
def branch(call: Call, condition: Tensor, *values: Tensor) -> list[Tensor]:
    """Run the first body if the condition holds, else the second."""
    inputs = [_of(call, i + 1) for i in range(len(values))]
    body = call.op.bodies[0 if bool(condition) else 1]
    return call.run_body(body, inputs, call.run.position)


@op
def yield_(call: Call, *results: Tensor) -> None:
    """Name the results of a body; the code that runs the body reads them."""


@op
def repeat_while(call: Call, condition: Tensor) -> None:
    """End the run after this device iteration, unless the condition holds."""
    call.run.record.ends = not bool(condition)
