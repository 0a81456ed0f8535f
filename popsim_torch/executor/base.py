"""What the parts of an executor share: its model and settings, and what was compiled."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from popsim_torch.errors import Error
from popsim_torch.executor.compile import CompiledModel
from popsim_torch.executor.connection import Connection
from popsim_torch.executor.device_state import DeviceState
from popsim_torch.executor.weight_sync import WeightSync
from popsim_torch.optim.captures import GradientCapture
from popsim_torch.optim.planning import OptimizerSettings
from popsim_torch.options import Options
from popsim_torch.profiling import Channel

__all__ = ["ExecutorBase"]


class ExecutorBase:
    """The attributes that every part of an executor reads; ``PoplarExecutor`` sets them."""

    _user_model: nn.Module
    _traced_model: nn.Module
    _options: Options
    _optimizer: torch.optim.Optimizer | None
    _settings: OptimizerSettings | None
    _captures: tuple[GradientCapture, ...]
    _compiled: CompiledModel | None
    _state: DeviceState | None
    _connection: Connection
    _weights: WeightSync
    _channel: Channel
    _last_complete_run: int
    # What ``fit`` and the like recorded, where that was the last to run.
    _fitted_anchors: Mapping[str, torch.Tensor] | None = None

    def _require_compiled(self, what: str) -> CompiledModel:
        if self._compiled is None:
            raise Error(
                f"{what}: the model has not been compiled or has been destroyed. Call it, or "
                "model.compile(...), first."
            )
        return self._compiled
