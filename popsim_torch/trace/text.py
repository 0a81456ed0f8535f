"""A trace as text, one line per node."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.fx

from popsim_torch.trace.named_graph import NamedGraph
from popsim_torch.trace.origin import origin_of
from popsim_torch.trace.result import TraceResult


def trace_text(traced: TraceResult | NamedGraph) -> str:
    """Return a line per node: result, operator, arguments, then name, stage and origin."""
    if isinstance(traced, NamedGraph):
        return _text(traced.traced.graph_module.graph, traced.names)
    return _text(traced.graph_module.graph, {})


def _text(graph: torch.fx.Graph, names: Mapping[torch.fx.Node, str]) -> str:
    lines = [_line(node, names.get(node, "")) for node in graph.nodes]
    return "\n".join(lines) + "\n"


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
