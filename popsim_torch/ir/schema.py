"""The inputs, attributes and outputs of the device's ops.

``csrc/ops/schema.h`` explains the words; the table comes from there (``passes/op_table.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

OpTable = Mapping[str, "OpInfo"]
"""The entry of every kind of op."""


@dataclass(frozen=True)
class Operand:
    """An input or output of an op, or several consecutive ones.

    Attributes:
        name: The name in messages.
        count: The number of operands; ``counted``: the attribute or input ``counter`` has it.
        has_gaps: Whether some of ``any`` number of operands may be left out.
        counter: See ``count``.
        dtypes: The allowed dtypes; empty for all.
        memory: Inputs and outputs with the same letter are one tensor; empty for separate memory.
        written: Whether the op writes it. Other outputs with a letter are views of their input.
    """

    name: str
    count: Literal["one", "optional", "any", "counted"]
    has_gaps: bool
    counter: str
    dtypes: frozenset[torch.dtype]
    memory: str
    written: bool


@dataclass(frozen=True)
class AttributeRule:
    """The allowed values of an attribute of an op.

    Attributes:
        name: Its name.
        type: ``bool``, ``int``, ``float``, ``str``, ``dtype`` or ``arguments``.
        is_list: Whether it is a list of these.
        length: Length of the list, if it is fixed.
        required: Whether the attribute must be present.
        choices: The allowed words; empty for any word.
        least: The smallest allowed number.
        most: The largest allowed number.
    """

    name: str
    type: str
    is_list: bool
    length: int | None
    required: bool
    choices: frozenset[str]
    least: float | None
    most: float | None


@dataclass(frozen=True)
class OpInfo:
    """The entry of a kind of op in the device's table.

    Attributes:
        name: The kind.
        repeats: The attribute with the number of repetitions of inputs and outputs; empty: once.
        inputs: The inputs, in order.
        attributes: The attributes, by name.
        outputs: The outputs, in order.
        family: The folder of ``csrc/ops`` that contains it.
        reuses_input: Whether an output may use the memory of an input.
        cheap: Whether computing the results again takes little more than reading the inputs.
        layer: Whether it is a product or similar, so that its results belong to the next layer.
        exact: Whether it only moves numbers, or already gets them in the dtype of its results.
        calls_host: Whether its results come from the host.
    """

    name: str
    repeats: str
    inputs: tuple[Operand, ...]
    attributes: Mapping[str, AttributeRule]
    outputs: tuple[Operand, ...]
    family: str
    reuses_input: bool
    cheap: bool
    layer: bool
    exact: bool
    calls_host: bool

    @property
    def sees_inputs(self) -> bool:
        """Whether its outputs are unchanged inputs."""
        return any(out.memory and not out.written for out in self.outputs)
