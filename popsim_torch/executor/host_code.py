"""The host functions that a program calls while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from popsim_torch.executor import host_weights
from popsim_torch.host_call import HostCall

__all__ = ["HostCode"]


class HostCode:
    """Runs the host calls of one program; each run gets this object.

    Args:
        calls: The host calls, by number.
    """

    def __init__(self, calls: Mapping[int, HostCall]) -> None:
        self._calls = calls

    def __call__(
        self, number: int, gradient: bool, tensors: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run a call for one micro-batch, on the thread that runs the program.

        Args:
            number: The number of the call.
            gradient: Whether to run the backward of the call.
            tensors: Copies of the op's inputs.

        Returns:
            The outputs of the op.

        Raises:
            BaseException: The exception that the user's code raises.
        """
        call = self._calls[number]
        # The call uses the host's weights; they cannot be fetched during a run.
        with host_weights.without_sync():
            return call.differentiate(tensors) if gradient else call.run(tensors)
