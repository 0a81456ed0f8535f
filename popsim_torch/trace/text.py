"""A trace as text, one line per node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.fx

from popsim_torch.trace.books.result import TraceResult
from popsim_torch.trace.graph.bodies import Control, control_of
from popsim_torch.trace.graph.origin import origin_of
from popsim_torch.trace.named_graph import NamedGraph


def trace_text(traced: TraceResult | NamedGraph) -> str:
    """Return a line per node: result, operator, arguments, then name, stage and origin."""
    names = traced.names if isinstance(traced, NamedGraph) else {}
    if isinstance(traced, NamedGraph):
        traced = traced.traced
    return "\n".join(_lines(traced.graph_module.graph, names, traced.controls)) + "\n"


def _lines(
    graph: torch.fx.Graph, names: Mapping[torch.fx.Node, str], controls: Sequence[Control]
) -> Iterator[str]:
    """Yield a line for each node, then the lines of its bodies, indented."""
    for node in graph.nodes:
        yield _line(node, names.get(node, ""))
        control = control_of(node, controls)
        for number, body in enumerate(() if control is None else control.bodies):
            yield f"  body {number}"
            yield from (f"    {line}" for line in _lines(body.graph, names, controls))


def _line(node: torch.fx.Node, name: str) -> str:
    origin = origin_of(node)
    arguments = ", ".join(
        [*map(str, node.args), *(f"{key}={value}" for key, value in node.kwargs.items())]
    )
    value = node.meta.get("val")
    kind = ""
    if isinstance(value, torch.Tensor):
        kind = f": {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    notes = [repr(name)] if name else []
    if origin.source or origin.scope or origin.backward:
        direction = "backward" if origin.backward else "forward"
        notes.append(f"{direction} {origin.stage}")
    notes += [part for part in (origin.scope, origin.source) if part]
    note = f"  # {', '.join(notes)}" if notes else ""
    return f"{node.name}{kind} = {node.target}({arguments}){note}"
