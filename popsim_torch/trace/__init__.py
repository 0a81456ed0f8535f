"""Traces a user's module to one torch.fx graph of forward and backward; nodes have an origin."""

from popsim_torch.trace.books.result import PrintRequest, TraceRequest, TraceResult
from popsim_torch.trace.module_state import check_traceable
from popsim_torch.trace.tracer import trace

__all__ = ["PrintRequest", "TraceRequest", "TraceResult", "check_traceable", "trace"]
