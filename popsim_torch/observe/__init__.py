"""Looks into a program while it trains: queues for chosen tensors, and tables of what they hold."""

from popsim_torch.observe.summary import (
    TensorSummary,
    epoch_title,
    extended_table,
    step_title,
    summarise,
    summary_table,
)

__all__ = [
    "TensorSummary",
    "epoch_title",
    "extended_table",
    "step_title",
    "summarise",
    "summary_table",
]
