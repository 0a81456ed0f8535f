"""Ops that the host observes, code of users, and all other operators of PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from popsim_torch.anchors import kept_micro_batches
from popsim_torch.dtypes import is_continuous
from popsim_torch.enums import OutputMode
from popsim_torch.errors import Error
from popsim_torch.ir import TensorArgument, TensorListArgument
from popsim_torch.private_torch.operators import schema_of
from popsim_torch.reference.call import Call, op, widened
from popsim_torch.reference.draws import mix_seed


@op
def anchor(call: Call, x: Tensor) -> None:
    """Keep a value of this micro-batch; for an op of an update, of all its micro-batches."""
    at, loop, mode = call.run.position, call.run.loop, OutputMode[call["mode"]]
    num_steps = loop.gradient_accumulation
    first = 0 if call["per_update"] else at.accumulation_step
    last = num_steps - 1 if call["per_update"] else first
    entries = call.run.record.returns.setdefault(call["buffer"], {})
    value = call.stored[0]
    assert value is not None
    if mode == OutputMode.Sum:
        sums, kept = call.run.record.sums, widened(value.dtype)
        total = value.to(kept if is_continuous(kept) else torch.int64) * (last - first + 1)
        sums[call["buffer"]] = entries[0] = sums.get(call["buffer"], 0) + total
        return
    iterations, steps = kept_micro_batches(
        *(mode, call["period"], loop.device_iterations, num_steps),
        iterations_before=at.step // num_steps - at.device_iteration,
    )
    if at.device_iteration not in iterations:
        return
    number = iterations.index(at.device_iteration) * len(steps)
    for step in range(first, last + 1):
        if step in steps:
            entries[number + steps.index(step)] = value


@op
def enqueue(call: Call, *x: Tensor) -> None:
    """Put an element into a queue."""
    elements = call.run.record.queues.setdefault(call["queue"], [])
    types = [call.run.held(getattr(torch, name)) for name in call["dtypes"]]
    elements.append(tuple(value.to(dtype) for value, dtype in zip(x, types, strict=True)))


@op
def position(call: Call) -> Tensor:
    """Return the numbers of the device iteration, counted over all runs, and of its micro-batch."""
    at = call.run.position
    iteration = at.step // call.run.loop.gradient_accumulation
    return torch.tensor([iteration, at.accumulation_step])


@op
def print_(call: Call, x: Tensor) -> Tensor:
    """Record a printed tensor, and return it."""
    call.run.record.prints.append((call["title"], x))
    return x


def _foreign(call: Call) -> Sequence[Tensor | None]:
    if call.run.foreign is None:
        raise Error(
            f"Interpreter: {call.op.kind} '{call.op.name}' runs code that is not the program's. "
            "Pass the Interpreter a function `foreign` that takes this op and its inputs, and "
            "returns its results."
        )
    return call.run.foreign(call.op, call.stored)


@op
def custom(call: Call, *inputs: Tensor) -> Sequence[Tensor | None]:
    """Call a user's operator."""
    return _foreign(call)


@op
def host_call(call: Call, *x: Tensor) -> Sequence[Tensor | None]:
    """Call a function of the host."""
    return _foreign(call)


@op
def aten(call: Call, *inputs: Tensor | None) -> list[Tensor]:
    """Call an operator of PyTorch, on tensors with the dtypes of the program."""
    name = call["operator"].split("::")
    packet = getattr(getattr(torch.ops, name[0]), name[1])
    function = getattr(packet, call["overload"] or "default")
    positional, named = [], {}
    for rule, value in zip(schema_of(function).arguments, call["arguments"], strict=True):
        boxed = _boxed(call, value)
        if str(rule.type) in ("Optional[Generator]", "Generator"):
            boxed = torch.Generator()
            seed = mix_seed(call.run.seed, call["stream"], call.run.position.step)
            boxed.manual_seed(seed - (1 << 64) if seed >> 63 else seed)
        if rule.kwarg_only:
            named[rule.name] = boxed
        else:
            positional.append(boxed)
    found: Any = function(*positional, **named)
    if isinstance(found, Tensor):
        return [found]
    flat: list[Tensor] = []
    for item in found:
        flat += [item] if isinstance(item, Tensor) else item
    return flat


def _boxed(call: Call, value: Any) -> Any:
    if isinstance(value, TensorArgument):
        return call.stored[value.input]
    if isinstance(value, TensorListArgument):
        return [None if i < 0 else call.stored[i] for i in value.inputs]
    return value
