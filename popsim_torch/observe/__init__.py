"""Looks into a program while it trains: queues for chosen tensors, and tables of what they hold."""

from popsim_torch.observe.filters import Glob, process_filters
from popsim_torch.observe.summary import (
    TensorSummary,
    epoch_title,
    extended_table,
    step_title,
    summarise,
    summary_table,
)

__all__ = [
    "Glob",
    "TensorSummary",
    "epoch_title",
    "extended_table",
    "process_filters",
    "step_title",
    "summarise",
    "summary_table",
]
