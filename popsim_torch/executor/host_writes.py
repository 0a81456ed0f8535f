"""Notices that somebody has written to weights of the host after they were copied."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from popsim_torch import _native, logs
from popsim_torch.executor import host_weights
from popsim_torch.private_torch.tensors import version_of

__all__ = ["HostWrites"]


class HostWrites:
    """The versions of the host's tensors at the last copy from or to a device.

    PyTorch counts the changes in place of a tensor. It does not count those through ``.data``.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._tensors: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._marks = _native.tensor_marks([])
        self._warned = False

    def note(self, hosts: Mapping[str, torch.Tensor]) -> None:
        """Record that host and device have the same values of these tensors.

        Args:
            hosts: The tensors of the host, by name.
        """
        known = dict(zip(self._names, zip(self._tensors, self._versions, strict=True), strict=True))
        for name, host in hosts.items():
            if host.is_inference():
                continue  # it has no count
            tensor = host_weights.plain(host)  # counts together with the host's tensor
            known[name] = tensor, version_of(tensor)
        self._names = list(known)
        self._tensors = [tensor for tensor, _ in known.values()]
        self._versions = [version for _, version in known.values()]
        self._marks = _native.tensor_marks(self._tensors)

    def warn(self) -> None:
        """Warn once if a tensor was changed since then: the device does not have the change."""
        # The fast path of nearly all calls.
        if self._warned or _native.tensor_marks(self._tensors) == self._marks:
            return
        changed = [
            name
            for name, tensor, version in zip(
                self._names, self._tensors, self._versions, strict=True
            )
            if version_of(tensor) != version
        ]
        if not changed:
            return
        self._warned = True
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        logs.python.warning(
            "'%s'%s changed on the host, but the device still has the former values. Call "
            "copyWeightsToDevice() of the compiled model after a change on the host; its "
            "load_state_dict does that itself.",
            *(changed[0], more),
        )
