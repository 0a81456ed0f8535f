"""Batch norm that averages over all batches (``momentum=None``): the device counts the batches.

PyTorch converts the counter to a Python number, the factor of the new statistics. Here the operator
gets empty running statistics and a factor of one, so it returns the statistics of the batch. A
factor that is a tensor accumulates them, and the device keeps the counter like a running statistic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

from popsim_torch.private_torch.modules import BatchNorm
from popsim_torch.trace.repeated_updates import is_in_checkpoint, note_update

__all__ = ["cumulative_norm", "lasting_counters"]


def lasting_counters(module: nn.Module, buffers: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Return the names of integer buffers in which forward counts, and which the device keeps.

    Args:
        module: A model.
        buffers: Its buffers by name.
    """
    counters = {
        id(norm.num_batches_tracked)
        for norm in module.modules()
        if isinstance(norm, BatchNorm) and norm.momentum is None
    }
    return frozenset(
        name
        for name, buffer in buffers.items()
        if id(buffer) in counters and not buffer.dtype.is_floating_point
    )


def cumulative_norm() -> AbstractContextManager[object]:
    """Make batch norms with ``momentum=None`` count on the device in this scope."""
    return mock.patch.object(BatchNorm, "forward", _counting(BatchNorm.forward))


def _counting(
    forward: Callable[[BatchNorm, torch.Tensor], torch.Tensor],
) -> Callable[[BatchNorm, torch.Tensor], torch.Tensor]:
    def counting(self: BatchNorm, input: torch.Tensor) -> torch.Tensor:
        if self.momentum is not None or not self.training or not self.track_running_stats:
            return forward(self, input)
        count, mean, variance = self.num_batches_tracked, self.running_mean, self.running_var
        if count is None or mean is None or variance is None:
            return forward(self, input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        count.add_(1)
        factor = count.float().reciprocal()
        now = [torch.zeros_like(average, dtype=torch.float32) for average in (mean, variance)]
        result = F.batch_norm(input, now[0], now[1], self.weight, self.bias, True, 1.0, self.eps)
        averages = list(zip((mean, variance), now, strict=True))
        for average, of_batch in averages:
            average.copy_((1.0 - factor) * average + factor * of_batch)
        if is_in_checkpoint():
            note_update(lambda: _count_again(count, averages))
        return result

    return counting


def _count_again(count: torch.Tensor, averages: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    count.data.add_(1)
    factor = count.float().reciprocal()
    for average, of_batch in averages:
        average.data.copy_((1.0 - factor) * average + factor * of_batch)
