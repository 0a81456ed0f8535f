"""Removes mutation from a trace; its nodes are mapped to those of the graph without mutation."""

from __future__ import annotations

from dataclasses import replace

from popsim_torch.trace.books.result import TraceResult
from popsim_torch.trace.graph.bodies import controls_known
from popsim_torch.trace.graph.functionalise import functionalise_graph
from popsim_torch.trace.join_slices import join_slices


def functionalise(traced: TraceResult) -> TraceResult:
    """Return a trace without mutation that computes the same; gradients of parts are joined.

    Args:
        traced: A trace; this function does not change it.

    Returns:
        The given trace if it has no mutation, else one with another graph.
    """
    partial = traced.partial_gradients
    watched = {*traced.forward_of.values(), *partial.values()}
    watched |= {*traced.losses, *traced.differentiated, *traced.checkpoints}
    with controls_known(traced.controls):
        module, became = functionalise_graph(traced.graph_module, watched)
    if module is traced.graph_module:
        return traced
    join_slices(module.graph)
    return replace(
        traced,
        graph_module=module,
        forward_of={key: became[node] for key, node in traced.forward_of.items()},
        partial_gradients={key: became[node] for key, node in partial.items()},
        losses=[became[node] for node in traced.losses],
        differentiated=[became[node] for node in traced.differentiated],
        checkpoints=[became[node] for node in traced.checkpoints],
    )
