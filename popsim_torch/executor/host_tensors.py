"""Finds a model's tensors by the names that they had when the model was compiled."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from popsim_torch.errors import Error
from popsim_torch.executor import host_weights

_logger = logging.getLogger("poptorch::python")

_MOST_SHOWN = 3


class HostTensors:
    """The parameters and buffers of a compiled model; the user may have changed them since then.

    Args:
        module: The model that was compiled.
        shapes: The shapes of the tensors that the program uses, by name.
        fixed: Whether to keep the present tensors, even if the model has others by their names
            later.
    """

    def __init__(
        self, module: nn.Module, shapes: Mapping[str, tuple[int, ...]], *, fixed: bool = False
    ) -> None:
        self._module = module
        self._shapes = shapes
        tied = defaultdict(list)
        tensors = named_tensors(module)
        self._fixed = tensors if fixed else None
        for name, tensor in tensors.items():
            tied[id(tensor)].append(name)
        self._aliases = {name: tied[id(tensors[name])] for name in shapes}

    def present(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors that the model has now by all of their names; do not fetch weights."""
        return named_tensors(self._module) if self._fixed is None else self._fixed

    def find(self, names: Iterable[str], *, what_fits: bool = False) -> dict[str, torch.Tensor]:
        """Return tensors of the model by name, detached; do not fetch weights.

        Args:
            names: Names of tensors that the program uses.
            what_fits: Leave out changed tensors with a warning, instead of an error.

        Raises:
            Error: One of the tensors has changed, and ``what_fits`` is not set.
        """
        present = self.present()
        found: dict[str, torch.Tensor] = {}
        name_of: dict[int, str] = {}
        problems = []
        for name in names:
            tensor = present.get(name)
            problem = self._problem(name, tensor, present)
            if tensor is not None and problem is None:
                first = name_of.setdefault(id(tensor), name)
                if first == name:
                    found[name] = host_weights.plain(tensor)
                    continue
                problem = f"'{first}' and '{name}', which were two tensors, are one now"
            problems.append(problem or "")
        if problems:
            self._report(problems, what_fits)
        return found

    def used_names(self, names: Iterable[str]) -> set[str]:
        """Return the names by which the program knows tensors that are given by any of their names.

        Args:
            names: Names of tensors; tensors that the program does not use are left out.
        """
        wanted = set(names)
        return {name for name, aliases in self._aliases.items() if wanted.intersection(aliases)}

    def _problem(
        self, name: str, tensor: torch.Tensor | None, present: Mapping[str, torch.Tensor]
    ) -> str | None:
        """Return a description of the change of a tensor; nothing if it has not changed."""
        if tensor is None:
            return f"'{name}' is not in the model any more"
        if tensor.is_meta:
            return f"'{name}' is on the device 'meta' and has no values"
        shape = self._shapes[name]
        if tuple(tensor.shape) != shape:
            return f"'{name}' has the shape {tuple(tensor.shape)}, on the device it has {shape}"
        for alias in self._aliases[name]:
            if present.get(alias, tensor) is not tensor:
                return f"'{name}' and '{alias}', which were one tensor, are two now"
        return None

    def _report(self, problems: list[str], what_fits: bool) -> None:
        text = "; ".join(problems[:_MOST_SHOWN])
        if len(problems) > _MOST_SHOWN:
            text += f"; and {len(problems) - _MOST_SHOWN} more"
        if what_fits:
            _logger.warning("Weights of the device are lost: %s.", text)
            return
        raise Error(
            f"Weights cannot be copied between host and device: {text}. The parameters and buffers "
            "must be those that the model was compiled with. Change them back, or call destroy() "
            "on the executor to compile the model again as it is now."
        )


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by all of their names."""
    return {
        **dict(nn.Module.named_parameters(module, remove_duplicate=False)),
        **dict(nn.Module.named_buffers(module, remove_duplicate=False)),
    }
