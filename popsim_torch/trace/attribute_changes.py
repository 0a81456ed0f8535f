"""Warns of attributes that forward changes: they end with the trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn

from popsim_torch import logs
from popsim_torch.private_torch.fake import FakeTensor
from popsim_torch.private_torch.trees import tree_leaves
from popsim_torch.trace.former_values import reads_entries, reads_former_value
from popsim_torch.trace.graph.traced_tensors import has_memory, host_computation

__all__ = ["UsedTensors", "holds_fake", "warn_of_changes"]

_OF_MODULES = frozenset(vars(nn.Module()))
_BUFFER = "Make it a buffer (register_buffer), and change it in place (copy_, add_)."
_NUMBER = "A buffer of floating-point numbers, changed in place, counts on the device."


class UsedTensors(Protocol):
    """Knows which tensors of the host forward has used."""

    def was_used(self, host: torch.Tensor) -> bool:
        """Return whether forward has used a host tensor."""

    def is_copy(self, traced: torch.Tensor, host: torch.Tensor) -> bool:
        """Return whether a traced tensor is the unchanged data of a host tensor."""

    def differs_in_runs(self, traced: torch.Tensor) -> bool:
        """Return whether a traced tensor depends on inputs, or on state that changes."""


def holds_fake(value: Any) -> bool:
    """Return whether a value has traced tensors in it."""
    return any(True for _ in _fakes(value))


def warn_of_changes(
    model: nn.Module, before: Mapping[nn.Module, Mapping[str, Any]], used: UsedTensors
) -> None:
    """Warn of attributes with which the next call of forward would compute something else.

    Args:
        model: The model.
        before: The attributes before forward, of each module in the model.
        used: Knows whether forward has used a former value, which it has replaced by another.
    """
    changes = _Changes(model, used)
    texts = [
        f"forward of {type(module).__name__} {text}"
        for module, attributes in before.items()
        for name, value in vars(module).items()
        if name not in _OF_MODULES
        and (text := changes.text(module, name, attributes.get(name), value)) is not None
    ]
    for text in dict.fromkeys(texts):  # layers of one class have the same
        logs.python.warning(text)


class _Changes:
    def __init__(self, model: nn.Module, used: UsedTensors) -> None:
        self._model = model
        self._used = used

    def text(self, module: nn.Module, name: str, then: Any, now: Any) -> str | None:
        """Return the text about an attribute whose change matters; None for others."""
        if isinstance(then, (int, float)) and isinstance(now, (int, float)):
            if now == then:
                return None
            return _text(f"changes the attribute '{name}' from {then} to {now}", _NUMBER)
        if isinstance(then, torch.Tensor):
            matters = now is not then and self._replaces(then, now)
        elif not self._differs(now):
            matters = False
        elif now is then:
            if not reads_entries(module, name):
                return None
            return _text(f"puts tensors into the attribute '{name}'", _BUFFER)
        else:
            matters = reads_former_value(module, name)
        return _text(f"assigns a tensor to the attribute '{name}'", _BUFFER) if matters else None

    def _replaces(self, then: torch.Tensor, now: Any) -> bool:
        """Return whether a tensor matters to forward, which has replaced it by another value."""
        is_tensor = isinstance(now, torch.Tensor)
        if is_tensor and now.shape != then.shape and not self._differs(now):
            return False  # a table that forward has made larger
        if holds_fake(now):
            if self._used.is_copy(now, then):  # self.table = self.table.to(x.device)
                return False
            # (otherwise forward computes it anew each time, like the weight of weight_norm)
            return self._used.was_used(then) or _is_kept(then, self._model)
        return is_tensor and self._used.was_used(then) and _differ(then, now)

    def _differs(self, value: Any) -> bool:
        return any(self._used.differs_in_runs(one) for one in _fakes(value))


def _text(what: str, todo: str) -> str:
    return (
        f"{what}. It runs once, when the model is compiled: all runs of the program begin with the "
        f"former value. {todo}"
    )


def _fakes(value: Any) -> list[FakeTensor]:
    if value is None or isinstance(value, (bool, int, float, str)):
        return []
    if isinstance(value, (dict, list, tuple)) and not value:
        return []  # most attributes of a module are empty
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, FakeTensor)]


def _is_kept(tensor: torch.Tensor, module: nn.Module) -> bool:
    """Return whether an attribute of a module, or of a module in it, has a tensor."""
    attributes = (value for child in module.modules() for value in vars(child).values())
    return any(leaf is tensor for value in attributes for leaf in tree_leaves(value))


def _differ(then: torch.Tensor, now: torch.Tensor) -> bool:
    """Return whether host tensors have other values; of another dtype they are converted ones."""
    if then.dtype != now.dtype or not (has_memory(then) and has_memory(now)):
        return False
    with host_computation():
        return not torch.equal(then, now)
