"""Observes a program while it trains: queues for chosen tensors, and tables of statistics."""

from popsim_torch.observe.callback import OutfeedCallback
from popsim_torch.observe.filters import Glob, process_filters
from popsim_torch.observe.layers import MaybeOutfeed, Outfeed
from popsim_torch.observe.optimizer import OutfeedOptimizer, gradient_names
from popsim_torch.observe.queue import MaybeOutfeedQueue
from popsim_torch.observe.summary import (
    TensorSummary,
    epoch_title,
    extended_table,
    step_norms,
    step_title,
    summarise,
    summary_table,
)

__all__ = [
    "Glob",
    "MaybeOutfeed",
    "MaybeOutfeedQueue",
    "Outfeed",
    "OutfeedCallback",
    "OutfeedOptimizer",
    "TensorSummary",
    "epoch_title",
    "extended_table",
    "gradient_names",
    "process_filters",
    "step_norms",
    "step_title",
    "summarise",
    "summary_table",
]
