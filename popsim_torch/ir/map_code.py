"""The code of ``map`` ops: instructions on the elements of tensors.

In the attributes of an op the code is text, and values are numbers: first the op's inputs, then its
constants, then the results of the instructions (``csrc/ops/map/map.cpp``). In this file values have
a source instead, so code can grow, include the code of another op, and be compared with a formula.
Only this file writes and reads the text.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from popsim_torch.ir.graph import Attribute, Op, Tensor


def num_instructions(op: Op) -> int:
    """Return the number of instructions of a ``map`` op."""
    code: Any = op.attributes["code"]
    return len(code)


class Source(enum.Enum):
    """The source of a value."""

    INPUT = enum.auto()
    CONSTANT = enum.auto()
    INSTRUCTION = enum.auto()


class MapValue(NamedTuple):
    """A value that instructions read: an input, a constant or the result of an instruction."""

    source: Source
    position: int


class Instruction(NamedTuple):
    """One instruction, with its name in ``csrc/ops/map/instructions.cpp``."""

    name: str
    operands: tuple[MapValue, ...]


Formula = Callable[..., MapValue]
"""Appends instructions to the given code (the first argument); the operands follow."""


class MapCode:
    """The code of one ``map`` op.

    Attributes:
        inputs: Ids of the tensors that the op reads, each once.
        constants: The numbers that instructions read.
        instructions: The instructions, in order.
        results: The values that the op writes.
    """

    def __init__(self) -> None:
        self.inputs: list[int] = []
        self.constants: list[float] = []
        self.instructions: list[Instruction] = []
        self.results: list[MapValue] = []

    @classmethod
    def of(cls, op: Op) -> MapCode:
        """Return the code of a ``map`` op."""
        code = cls()
        code.results = code.append(op)
        return code

    def __call__(self, name: str, *operands: Tensor | float | MapValue) -> MapValue:
        """Append an instruction and return its result."""
        self.instructions.append(Instruction(name, tuple(map(self.value, operands))))
        return MapValue(Source.INSTRUCTION, len(self.instructions) - 1)

    def value(self, operand: Tensor | float | MapValue) -> MapValue:
        """Return the value of a tensor or a number; each occurs once, and 0 and -0 differ."""
        if isinstance(operand, MapValue):
            return operand
        if isinstance(operand, Tensor):
            return self.input(operand.id)
        number = float(operand)
        for index, constant in enumerate(self.constants):
            same_sign = math.copysign(1.0, constant) == math.copysign(1.0, number)
            if constant == number and same_sign:
                return MapValue(Source.CONSTANT, index)
        return self._constant(number)

    def input(self, tensor_id: int) -> MapValue:
        """Return the value of a tensor."""
        if tensor_id not in self.inputs:
            self.inputs.append(tensor_id)
        return MapValue(Source.INPUT, self.inputs.index(tensor_id))

    def stored(self, value: MapValue, dtype: torch.dtype) -> MapValue:
        """Return a value as it is after a store to memory of a dtype."""
        if dtype == torch.float16:
            return self("half", value)
        if dtype == torch.bool:
            return self("ne", value, self._constant(0.0))
        return value

    def append(self, op: Op, known: Mapping[int, MapValue] | None = None) -> list[MapValue]:
        """Append the code of a ``map`` op.

        Args:
            op: The op; its inputs become inputs of this code.
            known: Tensors whose values this code already has; they do not become inputs.

        Returns:
            The values that the op writes.
        """
        known = known or {}
        attributes: Any = op.attributes
        values = [known[i] if i in known else self.input(i) for i in op.inputs]
        values += map(self._constant, attributes["constants"])
        for line in attributes["code"]:
            name, *operands = line.split()
            values.append(self(name, *(values[int(number)] for number in operands)))
        return [values[number] for number in attributes["results"]]

    def computes(self, formula: Formula, *tensor_ids: int) -> bool:
        """Return whether the code is a formula of some inputs, in exactly the same form."""
        twin = MapCode()
        twin.inputs = list(self.inputs)
        twin.results = [formula(twin, *map(twin.input, tensor_ids))]
        return vars(twin) == vars(self)

    def put_first(self, tensor_id: int) -> None:
        """Make a tensor the first input; the others keep their order."""
        position = self.inputs.index(tensor_id)
        old = list(self.inputs)
        self.inputs.insert(0, self.inputs.pop(position))

        def moved(value: MapValue) -> MapValue:
            return self.input(old[value.position]) if value.source == Source.INPUT else value

        self.instructions = [
            Instruction(name, tuple(map(moved, operands))) for name, operands in self.instructions
        ]
        self.results = list(map(moved, self.results))

    def attributes(self) -> dict[str, Attribute]:
        """Return an op's attributes ``code``, ``constants`` and ``results``."""
        first = {
            Source.INPUT: 0,
            Source.CONSTANT: len(self.inputs),
            Source.INSTRUCTION: len(self.inputs) + len(self.constants),
        }

        def number(value: MapValue) -> int:
            return first[value.source] + value.position

        return {
            "code": [
                " ".join([name, *(str(number(operand)) for operand in operands)])
                for name, operands in self.instructions
            ],
            "constants": list(self.constants),
            "results": [number(result) for result in self.results],
        }

    def _constant(self, number: float) -> MapValue:
        self.constants.append(number)
        return MapValue(Source.CONSTANT, len(self.constants) - 1)
