"""A graph as text, one line per op."""

from __future__ import annotations

from popsim_torch.dtypes import dtype_name
from popsim_torch.ir.graph import NO_TENSOR, Graph


def to_text(graph: Graph) -> str:
    """Return the program as text: outputs, op, inputs, attributes, phase and stage per line."""
    names: dict[int, str] = {}
    for name, tensor_id in graph.names.items():
        names.setdefault(tensor_id, name)

    def show(tensor_id: int) -> str:
        if tensor_id == NO_TENSOR:
            return "-"
        tensor = graph.tensors[tensor_id]
        label = names.get(tensor_id, f"%{tensor_id}")
        return f"{label}: {dtype_name(tensor.dtype)}{list(tensor.shape)}"

    lines = []
    for op in graph.ops:
        outputs = ", ".join(show(i) for i in op.outputs)
        inputs = ", ".join(show(i) for i in op.inputs)
        attributes = ", ".join(f"{key}={value!r}" for key, value in op.attributes.items())
        arrow = f"{outputs} = " if outputs else ""
        lines.append(
            f"{op.phase.name.lower()} {op.stage}: {arrow}{op.kind}({inputs})"
            + (f" {{{attributes}}}" if attributes else "")
        )
    return "\n".join(lines)
