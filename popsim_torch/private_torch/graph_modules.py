"""Graph modules whose Python source is generated only when it is requested.

Why: ``torch.fx.GraphModule`` generates Python source for each graph, compiles it, and keeps it
until the process ends. A trace runs its graphs node by node, if at all. There is no public switch.

Checked: 2.13.
"""

from torch.fx._lazy_graph_module import _make_graph_module as make_graph_module
from torch.fx._lazy_graph_module import _use_lazy_graph_module as use_lazy_graph_module

__all__ = ["make_graph_module", "use_lazy_graph_module"]
