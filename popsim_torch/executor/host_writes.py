"""Notices that somebody has written to weights of the host after they were copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from popsim_torch import _native, logs
from popsim_torch.executor import host_weights
from popsim_torch.executor.registrations import num_registrations
from popsim_torch.private_torch.tensors import storage_key

__all__ = ["HostWrites"]

# The parts of a tensor's marks, in bytes; between them is the address of its memory.
_COUNT, _NUMBERS = slice(0, 8), slice(16, None)


class HostWrites:
    """The marks of the host's tensors at the last copy from or to a device.

    PyTorch counts the changes in place of a tensor, except those through ``.data``. So the marks
    also have the address of its memory and a few of its numbers.

    Args:
        present: Returns the tensors that the model has now, by name.
    """

    def __init__(self, present: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self._present = present
        self._num_registrations = num_registrations()
        # The model's own tensors, as they were at that number of registrations.
        self._owners: Mapping[str, torch.Tensor] = {}
        self._owners_at = -1
        self._names: list[str] = []
        # The model's tensors, and tensors that keep their memory.
        self._watched: list[torch.Tensor] = []
        self._tensors: list[torch.Tensor] = []
        self._marks = b""
        self._warned = False

    def note(self, hosts: Mapping[str, torch.Tensor]) -> None:
        """Record that host and device have the same values of these tensors.

        Args:
            hosts: The tensors of the host, by name.
        """
        if self._owners_at != num_registrations():
            self._owners_at = num_registrations()
            self._owners = self._present()
        known = dict(zip(self._names, zip(self._watched, self._tensors, strict=True), strict=True))
        for name, host in hosts.items():
            if host.is_inference():
                continue  # it has no count
            known[name] = self._owners.get(name, host), host_weights.plain(host)
        self._names = list(known)
        self._watched = [owner for owner, _ in known.values()]
        self._tensors = [tensor for _, tensor in known.values()]
        self._marks = self._present_marks()

    def warn(self) -> None:
        """Warn once if a tensor was changed since then: the device does not have the change."""
        # The fast path of nearly all calls.
        if self._warned:
            return
        changed = []
        if self._num_registrations != num_registrations():
            self._num_registrations = num_registrations()
            changed = self._replaced()
        if not changed and self._present_marks() == self._marks:
            return
        changed += self._written()
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

    def _present_marks(self) -> bytes:
        return _native.tensor_marks(self._watched, samples=True)

    def _written(self) -> list[str]:
        """Return the names of tensors with other values, or with other memory with other values."""
        marks = self._present_marks()
        size = len(marks) // max(len(self._names), 1)
        changed = []
        with host_weights.without_sync(), torch.no_grad():
            for i, (name, owner) in enumerate(zip(self._names, self._watched, strict=True)):
                part = slice(i * size, (i + 1) * size)
                now, then = marks[part], self._marks[part]
                if now == then:
                    continue
                plain = host_weights.plain(owner)
                if storage_key(plain) != storage_key(self._tensors[i]):
                    is_same = _is_same(plain, self._tensors[i])
                    self._tensors[i] = plain
                else:  # share_memory() moves the storage itself
                    is_same = now[_COUNT] == then[_COUNT] and now[_NUMBERS] == then[_NUMBERS]
                if not is_same:
                    changed.append(name)
        self._marks = marks
        return changed

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
