"""Sketches of programs: graphs whose ops lack attributes, or are not in the table of ops."""

from popsim_torch import _native
from popsim_torch.ir import Graph
from popsim_torch.passes.native_graph import to_native
from popsim_torch.passes.op_table import op_table


def verify_sketch(graph: Graph) -> None:
    """Check tensors and the order of reads and writes, but not the operands of ops."""
    sketch = graph.copy()
    for op in sketch.ops:
        if op.kind not in op_table():
            op.kind = "copy"
    with _native.translated_errors():
        to_native(sketch).verify_order()
