"""What a program calls of the host's code while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from popsim_torch.executor import host_weights
from popsim_torch.host_call import HostCall

__all__ = ["HostCode"]


class HostCode:
    """Runs the calls of the host of one program; handed over to each run.

    Args:
        calls: By number.
    """

    def __init__(self, calls: Mapping[int, HostCall]) -> None:
        self._calls = calls

    def __call__(
        self, number: int, gradient: bool, tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run a call for a micro-batch, on the thread that runs the program.

        Args:
            number: Which call.
            gradient: Whether to differentiate it.
            tensors: What the op is given, copied.

        Returns:
            What the op gives.

        Raises:
            BaseException: What the user's code raises.
        """
        call = self._calls[number]
        # Weights are the host's, which during a run cannot be brought up to date.
        with host_weights.without_sync():
            return call.differentiate(tensors) if gradient else call.run(tensors)
