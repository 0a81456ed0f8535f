"""Notices that somebody has written to weights of the host after they were copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from popsim_torch import _native, logs
from popsim_torch.executor import host_weights
from popsim_torch.executor.registrations import num_registrations
from popsim_torch.private_torch.tensors import storage_key, version_of

__all__ = ["HostWrites"]


class HostWrites:
    """The versions of the host's tensors at the last copy from or to a device.

    PyTorch counts the changes in place of a tensor. It does not count those through ``.data``.

    Args:
        present: Returns the tensors that the model has now, by name.
    """

    def __init__(self, present: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self._present = present
        self._num_registrations = num_registrations()
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
        if self._warned:
            return
        changed = []
        if self._num_registrations != num_registrations():
            self._num_registrations = num_registrations()
            changed = self._replaced()
        if not changed and _native.tensor_marks(self._tensors) == self._marks:
            return
        changed += [
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

    def _replaced(self) -> list[str]:
        """Return the names of tensors that are other ones now, with other values."""
        with host_weights.without_sync(), torch.no_grad():
            present = self._present()
            return [
                name
                for name, tensor in zip(self._names, self._tensors, strict=True)
                if name in present and not _is_same(host_weights.plain(present[name]), tensor)
            ]


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_meta or storage_key(one) == storage_key(other):
        return True  # (without values there is nothing to copy)
    return one.dtype == other.dtype and torch.equal(one, other)
