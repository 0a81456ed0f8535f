"""``map``: a chain of instructions on the elements of tensors, and ``copy``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from popsim_torch.reference.call import Call, op
from popsim_torch.typed_torch import broadcast_shapes

_ROUNDING = {"half": torch.float16, "bfloat16": torch.bfloat16}


def _truth(x: Tensor) -> Tensor:
    return x != 0


INSTRUCTIONS: dict[str, Callable[..., Tensor]] = {
    "abs": torch.abs,
    "add": torch.add,
    "and": lambda a, b: _truth(a) & _truth(b),
    "ceil": torch.ceil,
    "clamp": lambda x, low, high: torch.minimum(torch.maximum(x, low), high),
    "clamp_to_numbers": lambda x, low, high: torch.minimum(torch.maximum(x, low), high),
    "copy": lambda x: x,
    "cos": torch.cos,
    "cube": lambda x: x * x * x,
    "div": torch.div,
    "eq": torch.eq,
    "erf": torch.erf,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "floor": torch.floor,
    "ge": torch.ge,
    "gt": torch.gt,
    "inverse_square": lambda x: 1 / (x * x),
    "le": torch.le,
    "leaky_relu": lambda x, slope: torch.where(x > 0, x, x * slope),
    "log": torch.log,
    "log1p": torch.log1p,
    "log2": torch.log2,
    "lt": torch.lt,
    "max": torch.maximum,
    "min": torch.minimum,
    "mul": torch.mul,
    "ne": torch.ne,
    "neg": torch.neg,
    "not": lambda x: x == 0,
    "or": lambda a, b: _truth(a) | _truth(b),
    "pow": torch.pow,
    "reciprocal": torch.reciprocal,
    "relu": lambda x: x.clamp(min=0),
    "round": torch.round,
    "rsqrt": torch.rsqrt,
    "sigmoid": torch.sigmoid,
    "sign": lambda x: (x > 0).to(x.dtype) - (x < 0).to(x.dtype),
    "sin": torch.sin,
    "sqrt": torch.sqrt,
    "square": torch.square,
    "sub": torch.sub,
    "tanh": torch.tanh,
    "trunc": torch.trunc,
    "where": lambda condition, a, b: torch.where(_truth(condition), a, b),
}
"""The function of each instruction; booleans are 1 and 0."""


def run_code(
    call: Call, inputs: Sequence[Tensor], code: Sequence[str], constants: Sequence[float]
) -> list[Tensor]:
    """Return all values of a map's code: its inputs, its constants, each instruction's result."""
    dtype = torch.float64 if call.run.wide else torch.float32
    values = [x.to(dtype) for x in inputs]
    values += [torch.tensor(number, dtype=dtype) for number in constants]
    for line in code:
        name, *operands = line.split()
        given = [values[int(number)] for number in operands]
        if name in _ROUNDING:
            values.append(call.rounded(given[0], _ROUNDING[name]))
        else:
            values.append(INSTRUCTIONS[name](*given).to(dtype))
    return values


@op
def map_(call: Call, *inputs: Tensor) -> list[Tensor]:
    """Return some values of the code, in the broadcast shape of all inputs."""
    values = run_code(call, inputs, call["code"], call["constants"])
    shape = call.get("shape")
    if shape is None:
        shapes = [x.shape for x in inputs]
        shape = broadcast_shapes(*shapes)
    return [values[number].expand(shape) for number in call["results"]]


_OF_NUMBERS = {"float32": lambda x: x.to(torch.float32).to(torch.float64)}


@op
def numbers(call: Call, *inputs: Tensor) -> list[Tensor]:
    """Return some values of the code, which computes with single numbers in float64."""
    values = [x.to(torch.float64).reshape(()) for x in inputs]
    values += [torch.tensor(number, dtype=torch.float64) for number in call["constants"]]
    for line in call["code"]:
        name, *operands = line.split()
        given = [values[int(number)] for number in operands]
        function = _OF_NUMBERS.get(name) or INSTRUCTIONS[name]
        values.append(function(*given).to(torch.float64))
    return [values[number] for number in call["results"]]


@op
def copy(call: Call, x: Tensor) -> Tensor:
    """Return the tensor; the output's memory has the layout and the dtype."""
    return x
