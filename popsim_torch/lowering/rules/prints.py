"""Prints of tensors and of their gradients."""

from __future__ import annotations

from typing import Any

import torch.fx

from popsim_torch.ir import Tensor, names
from popsim_torch.lowering.emit.builder import Builder, Place
from popsim_torch.trace.named_graph import NamedGraph


def lower_print(builder: Builder, graph: NamedGraph, node: torch.fx.Node, place: Place) -> Tensor:
    """Add the op that prints the tensor of a ``popsim::print_tensor`` node."""
    request = graph.traced.prints[graph.key_of(node)]
    source: Any = node.args[0]
    tensor = builder.tensor(source)
    text_format = request.text_format
    out = builder.graph.add_view(tensor, tensor.shape, tensor.strides, tensor.offset)
    builder.op(
        "print",
        [tensor],
        [out],
        {
            "title": names.print_title(
                request.title,
                graph.printed_name(node),
                is_gradient=request.gradient_of is not None,
            ),
            "summarise_threshold": text_format.summarise_threshold,
            "edge_items": text_format.edge_items,
            "max_line_width": text_format.max_line_width,
            "digits": text_format.digits,
            "float_format": text_format.float_format,
            "separator": text_format.separator,
            "open_bracket": text_format.open_bracket,
            "close_bracket": text_format.close_bracket,
        },
        place=place,
        fixed_phase=True,
    )
    return out
