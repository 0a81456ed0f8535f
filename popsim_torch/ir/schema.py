"""What the ops of the device take and give, and whether an op of a graph fits that.

``csrc/ops/schema.h`` says what the words mean; the table comes from there (``passes/op_table.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from popsim_torch.dtypes import dtype_name
from popsim_torch.errors import InternalError
from popsim_torch.ir.graph import (
    NO_TENSOR,
    Attribute,
    Graph,
    Op,
    TensorArgument,
    TensorListArgument,
)

OpTable = Mapping[str, "OpInfo"]
"""What is known of every kind of op."""

_TYPES: Mapping[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (float,),
    "str": (str,),
    "dtype": (str,),
    "arguments": (type(None), bool, int, float, str, list, TensorArgument, TensorListArgument),
}


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

    @property
    def sees_inputs(self) -> bool:
        """Whether its outputs are inputs that it leaves as they are."""
        return any(out.memory and not out.written for out in self.outputs)


def check_op(graph: Graph, op: Op, table: OpTable) -> None:
    """Check an op against the table: what ``csrc/ops/check.cpp`` checks, but for shapes.

    Raises:
        InternalError: Naming the op and what is wrong.
    """
    info = table.get(op.kind)
    if info is None:
        raise _error(op, f"no op named '{op.kind}' in the device's table")
    _check_attributes(op, info)
    sets = list(_sets(op, info))
    for inputs, outputs in sets:
        _check_operands(graph, op, _bound(op, info, info.inputs, inputs, inputs), inputs, "input")
        bound = _bound(op, info, info.outputs, outputs, inputs)
        _check_operands(graph, op, bound, outputs, "output")
    _check_memory(graph, op, info, sets)


def _error(op: Op, problem: str) -> InternalError:
    return InternalError(f"ir.verify: {op.kind} '{op.name}': {problem}")


# --- Attributes ---


def _check_attributes(op: Op, info: OpInfo) -> None:
    for name, value in op.attributes.items():
        rule = info.attributes.get(name)
        if rule is None:
            raise _error(op, f"it has no attribute '{name}'")
        if not _fits(rule, value):
            raise _error(op, f"attribute '{name}' may not be {value!r}")
    for name, rule in info.attributes.items():
        if rule.required and name not in op.attributes:
            raise _error(op, f"attribute '{name}' is missing")


def _fits(rule: AttributeRule, value: Attribute) -> bool:
    if rule.type == "arguments" or rule.is_list:
        if not isinstance(value, list) or rule.length not in (None, len(value)):
            return False
        return all(_is_allowed(rule, item) for item in value)
    return _is_allowed(rule, value)


def _is_allowed(rule: AttributeRule, value: object) -> bool:
    if type(value) not in _TYPES[rule.type]:
        return False
    if rule.choices:
        return value in rule.choices
    if rule.least is not None and not value >= rule.least:  # type: ignore[operator]
        return False
    return rule.most is None or value <= rule.most  # type: ignore[operator]


# --- Inputs and outputs ---

_Ids = Sequence[int]


def _sets(op: Op, info: OpInfo) -> Iterator[tuple[_Ids, _Ids]]:
    """Yield inputs and outputs, set by set."""
    count = op.attributes.get(info.repeats, 1) if info.repeats else 1
    assert isinstance(count, int)
    if count > len(op.inputs) + 1 or len(op.inputs) % count or len(op.outputs) % count:
        raise _error(op, f"inputs and outputs are not those of {count} parameters")
    num_in, num_out = len(op.inputs) // count, len(op.outputs) // count
    for i in range(count):
        yield op.inputs[i * num_in : (i + 1) * num_in], op.outputs[i * num_out : (i + 1) * num_out]


def _bound(
    op: Op, info: OpInfo, operands: Sequence[Operand], ids: _Ids, inputs: _Ids
) -> list[Operand]:
    """Return the operand that each of the tensors ``ids`` is."""
    bound: list[Operand] = []
    for operand in operands:
        counted = operand.count == "counted"
        tensors = _count(op, info, inputs, operand.counter) if counted else 1
        if counted and tensors > len(ids):
            raise _error(
                op, f"'{operand.counter}' counts {tensors} '{operand.name}', not {len(ids)}"
            )
        bound += [operand] * tensors
    while len(bound) > len(ids) and bound[-1].count == "optional":
        bound.pop()
    for position, operand in enumerate(bound):
        if operand.count == "any":
            bound[position : position + 1] = [operand] * (len(ids) - len(bound) + 1)
            break
    if len(bound) != len(ids):
        what = "inputs" if operands is info.inputs else "outputs"
        raise _error(op, f"it has {len(bound)} {what}, not {len(ids)}")
    return bound


def _count(op: Op, info: OpInfo, inputs: _Ids, counter: str) -> int:
    if counter in info.attributes:
        value = op.attributes.get(counter, False)
        return int(value) if isinstance(value, int) else 1
    position = [operand.name for operand in info.inputs].index(counter)
    return int(position < len(inputs) and inputs[position] != NO_TENSOR)


def _check_operands(graph: Graph, op: Op, bound: list[Operand], ids: _Ids, what: str) -> None:
    for position, (operand, tensor_id) in enumerate(zip(bound, ids, strict=True)):
        if tensor_id == NO_TENSOR:
            if operand.count != "optional" and not operand.has_gaps:
                raise _error(op, f"{what} {position} '{operand.name}' is missing")
        elif operand.dtypes and graph.tensors[tensor_id].dtype not in operand.dtypes:
            dtype = dtype_name(graph.tensors[tensor_id].dtype)
            raise _error(op, f"{what} {position} '{operand.name}' may not be {dtype}")


def _check_memory(graph: Graph, op: Op, info: OpInfo, sets: Iterable[tuple[_Ids, _Ids]]) -> None:
    """Outputs lie where no other operand lies, or are the input that they are said to be."""
    if not op.outputs:
        return
    read = [root.id for root in graph.roots(op.inputs)]
    written = [root.id for root in graph.roots(op.outputs)]
    for inputs, outputs in sets:
        sources = _bound(op, info, info.inputs, inputs, inputs)
        for operand, tensor_id in zip(
            _bound(op, info, info.outputs, outputs, inputs), outputs, strict=True
        ):
            if tensor_id == NO_TENSOR:
                continue
            if operand.memory:
                position = [source.memory for source in sources].index(operand.memory)
                if not _is_same(graph, inputs[position], tensor_id):
                    raise _error(op, f"output '{operand.name}' is not its input seen once more")
            root = graph.root_of(tensor_id).id
            free = read.count(root) == bool(operand.memory) or (
                info.reuses_input
                and all(
                    _is_same(graph, i, tensor_id)
                    for i in op.inputs
                    if i != NO_TENSOR and graph.root_of(i).id == root
                )
            )
            if not free or written.count(root) != 1:
                raise _error(op, f"output '{operand.name}' is written where another operand lies")


def _is_same(graph: Graph, a: int, b: int) -> bool:
    first, second = graph.tensors[a], graph.tensors[b]
    return graph.root_of(a) is graph.root_of(b) and (
        (first.shape, first.strides, first.offset) == (second.shape, second.strides, second.offset)
    )
