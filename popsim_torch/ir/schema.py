"""What the ops of the device take and give.

``csrc/ops/schema.h`` says what the words mean; the table comes from there (``passes/op_table.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

OpTable = Mapping[str, "OpInfo"]
"""What is known of every kind of op."""


@dataclass(frozen=True)
class Operand:
    """An input or output of an op, or several that follow each other.

    Attributes:
        name: For messages.
        count: How many: ``counted`` is as many as the attribute or input ``counter`` says.
        has_gaps: Of ``any`` number some may be left out.
        counter: See ``count``.
        dtypes: Element types; empty: all.
        memory: Inputs and outputs with the same letter are one tensor; empty: nobody else's.
        written: The op writes there. Outputs with a letter and without this see their input.
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
    """What an attribute of an op may be.

    Attributes:
        name: Its name.
        type: ``bool``, ``int``, ``float``, ``str``, ``dtype`` or ``arguments``.
        is_list: Several of these.
        length: Of the list, if it is fixed.
        required: There is no program without it.
        choices: The words it may be; empty: any.
        least: Numbers are not below this.
        most: Numbers are not above this.
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
    """What the device's table says of a kind of op.

    Attributes:
        name: The kind.
        repeats: The attribute that says how often inputs and outputs are repeated; empty: once.
        inputs: In their order.
        attributes: By name.
        outputs: In their order.
        family: The folder of ``csrc/ops`` that it stands in.
        reuses_input: An output may lie over an input.
        cheap: Computing the results once more takes little more than reading the inputs.
        layer: A product or the like: what follows from its results is another layer.
        exact: It gives numbers as they were, or is given them in the type of its results.
        calls_host: Its results come from the host.
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
        """Whether its outputs are inputs that it leaves as they are."""
        return any(out.memory and not out.written for out in self.outputs)
