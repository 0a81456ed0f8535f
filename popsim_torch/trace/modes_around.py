"""Modes of PyTorch around the call that compiles a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from popsim_torch import logs

__all__ = ["without_modes_around"]


@contextmanager
def without_modes_around() -> Iterator[None]:
    """Switch off modes that would change what a trace records.

    Under ``torch.inference_mode`` there would be no gradients, though a training model computes
    them under ``torch.no_grad`` as well. Anomaly detection reads the values of gradients.
    """
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if torch.is_anomaly_enabled():
            logs.python.warning(
                "torch.autograd.set_detect_anomaly has no effect on a compiled model. Call "
                "Options.watch(), which stops before the first bad number and names its line."
            )
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        yield
