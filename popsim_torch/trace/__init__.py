"""From a user's module to one torch.fx graph of forward and backward, every node with its origin."""

from popsim_torch.trace.result import PrintRequest, TraceRequest, TraceResult
from popsim_torch.trace.tracer import trace

__all__ = ["PrintRequest", "TraceRequest", "TraceResult", "trace"]
