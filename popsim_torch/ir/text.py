"""Programs as text, for people and for golden tests."""

from __future__ import annotations

import html
import os
from collections.abc import Iterator

from popsim_torch.dtypes import dtype_name
from popsim_torch.ir.graph import (
    NO_TENSOR,
    Graph,
    Op,
    Role,
    Tensor,
    TensorKind,
    contiguous_strides,
)
from popsim_torch.ir.program import Program

_MAX_SHOWN = 8  # elements of a constant (count)


def to_text(graph: Graph, *, origins: bool = False) -> str:
    """Return a graph as text, one line per op: outputs, op, inputs and attributes.

    A view is followed by the owner of its memory, and by its offset and strides if it is not the
    whole memory in the same order.

    Args:
        graph: Any graph.
        origins: Append the modules and the line of the user's code that an op comes from.
    """
    shown = _Shown(graph)
    return "\n".join(_op_lines(graph, shown, origins))


class ProgramText(str):
    """The text of a program; Python shows it as lines, without quotes and escapes."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self)}</pre>"


def program_text(program: Program, *, origins: bool = True) -> ProgramText:
    """Return a whole program as text: its inputs, its ops, and the returned tensors.

    Args:
        program: Any program, as lowered or later.
        origins: See :func:`to_text`.
    """
    shown = _Shown(program.graph)
    lines = [*_given_lines(program.graph, shown), ""]
    lines += _op_lines(program.graph, shown, origins)
    lines += ["", *_return_lines(program, shown)]
    return ProgramText("\n".join(lines).strip("\n") + "\n")


class _Shown:
    """The text form of a graph's tensors."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._names: dict[int, str] = {}
        for name, tensor_id in graph.names.items():
            self._names.setdefault(tensor_id, name)

    def label(self, tensor_id: int) -> str:
        return self._names.get(tensor_id, f"%{tensor_id}")

    def __call__(self, tensor_id: int) -> str:
        if tensor_id == NO_TENSOR:
            return "-"
        tensor = self._graph.tensors[tensor_id]
        return f"{self.label(tensor_id)}: {_type_of(tensor)}{self._place_of(tensor)}"

    def _place_of(self, tensor: Tensor) -> str:
        """Return the place of a view: `` in x``, or `` in x+6[3, 1]`` with offset and strides."""
        if tensor.kind != TensorKind.VIEW:
            return ""
        base = self._graph.tensors[tensor.base]
        same = tensor.shape == base.shape and tensor.strides == base.strides
        where = f" in {self.label(base.id)}"
        if same and not tensor.offset:
            return where
        offset = f"+{tensor.offset}" if tensor.offset else ""
        strides = "" if tensor.strides == contiguous_strides(tensor.shape) else tensor.strides
        return f"{where}{offset}{list(strides) if strides else ''}"


def _type_of(tensor: Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


def _op_lines(graph: Graph, shown: _Shown, origins: bool, indent: str = "") -> Iterator[str]:
    """Yield a line for each op, then the lines of its bodies, indented."""
    for op in graph.ops:
        yield indent + _op_line(op, shown, origins)
        for body in op.bodies:
            of_body = _Shown(body)
            inputs = ", ".join(of_body(t.id) for t in body.of_kind(TensorKind.INPUT))
            yield f"{indent}  body({inputs})"
            yield from _op_lines(body, of_body, origins, indent + "    ")


def _op_line(op: Op, shown: _Shown, origins: bool) -> str:
    outputs = ", ".join(map(shown, op.outputs))
    inputs = ", ".join(map(shown, op.inputs))
    attributes = ", ".join(f"{key}={value!r}" for key, value in op.attributes.items())
    arrow = f"{outputs} = " if outputs else ""
    return (
        f"{op.phase.name.lower()} {op.stage}: {arrow}{op.kind}({inputs})"
        + (f" {{{attributes}}}" if attributes else "")
        + (_origin_note(op) if origins else "")
    )


def _origin_note(op: Op) -> str:
    source = op.origin.source.removeprefix(f"{os.getcwd()}{os.sep}")
    parts = [part for part in (op.origin.scope, source) if part]
    return f"  # {', '.join(parts)}" if parts else ""


def _given_lines(graph: Graph, shown: _Shown) -> Iterator[str]:
    """Yield a line for each tensor that exists before the first op runs."""
    for tensor in graph.tensors:
        if tensor.kind in (TensorKind.VALUE, TensorKind.VIEW):
            continue
        kept = tensor.kind == TensorKind.VARIABLE and tensor.role == Role.VALUE
        what = "kept value" if kept else tensor.role.value
        if tensor.kind == TensorKind.CONSTANT:
            what = "constant"
        data = tensor.value
        value = f" = {data.tolist()}" if data is not None and data.numel() <= _MAX_SHOWN else ""
        yield f"{what} {shown(tensor.id)}{value}"


def _return_lines(program: Program, shown: _Shown) -> Iterator[str]:
    graph = program.graph
    for tensor_id in program.outputs:
        yield f"output {shown(tensor_id)}"
    for position, tensor_id in program.changed_inputs.items():
        yield f"input {position} becomes {shown(tensor_id)}"
    for name, anchor in program.anchors.items():
        where = f"return {anchor.kept}" if anchor.kept is not None else shown.label(anchor.tensor)
        yield f"anchor '{name}' {list(anchor.shape)} in {where}"
    for name, tensor_id in graph.names.items():
        if shown.label(tensor_id) != name:
            yield f"also {name}: {shown.label(tensor_id)}"
