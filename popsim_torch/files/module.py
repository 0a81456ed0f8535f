"""A model from a file: its parameters and buffers under their names, without code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from popsim_torch.errors import Error
from popsim_torch.files.parts import pack, unpack
from popsim_torch.private_torch.module_parts import own_buffers, own_parameters, unsaved_buffers

__all__ = ["LoadedModule", "pack_module", "unpack_module"]

_PART = "model"


class LoadedModule(nn.Module):
    """Takes the place of the user's module in ``poptorch.load``, because a file has no code.

    It has the sub-modules, parameters and buffers of the saved module, under the same names, so
    ``state_dict()``, ``parameters()`` and ``load_state_dict()`` work as for the saved module. It
    has no ``forward``: the compiled program takes its place.

    Args:
        class_name: The class name of the saved module, for printing.
    """

    def __init__(self, class_name: str = "") -> None:
        super().__init__()
        self._class_name = class_name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to run, because there is only a compiled program, but no code.

        Raises:
            Error: Always.
        """
        raise Error(
            f"This {self._class_name} comes from a file, which holds its weights and its compiled "
            "program, but no Python code: it can be neither called on the host nor compiled "
            "again. Make the model from your own class, and give it these weights: "
            "model.load_state_dict(loaded.state_dict())."
        )

    def extra_repr(self) -> str:
        """Return the class name of the saved module."""
        return self._class_name


def pack_module(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Return the sections of a module.

    Args:
        module: The user's module.
        tensors: Its parameters and buffers by all of their names, as plain tensors with current
            values; the same object for all names of a tensor.
    """
    names = dict(nn.Module.named_modules(module, remove_duplicate=False))
    parts = []
    for path, part in names.items():
        dot = f"{path}." if path else ""
        parts.append(
            {
                "path": path,
                "class": type(part).__name__.removeprefix("Poptorch"),
                "training": part.training,
                "parameters": {
                    name: (tensors[dot + name], parameter.requires_grad)
                    for name, parameter in own_parameters(part).items()
                    if parameter is not None
                },
                "buffers": {
                    name: (tensors[dot + name], name not in unsaved_buffers(part))
                    for name, buffer in own_buffers(part).items()
                    if buffer is not None
                },
            }
        )
    return pack(_PART, parts, "The model")


def unpack_module(sections: Mapping[str, bytes]) -> LoadedModule:
    """Return the module of a file.

    Args:
        sections: The sections of the file.

    Raises:
        ValueError: The sections contain no valid module.
    """
    parameters: dict[int, nn.Parameter] = {}
    modules: dict[str, LoadedModule] = {}
    try:
        for part in unpack(sections, _PART):
            module = modules[part["path"]] = LoadedModule(part["class"])
            parent, _, name = part["path"].rpartition(".")
            if name:
                modules[parent].add_module(name, module)
            module.training = bool(part["training"])
            for name, (tensor, requires_grad) in part["parameters"].items():
                if id(tensor) not in parameters:
                    parameters[id(tensor)] = nn.Parameter(tensor, requires_grad=requires_grad)
                module.register_parameter(name, parameters[id(tensor)])
            for name, (tensor, persistent) in part["buffers"].items():
                module.register_buffer(name, tensor, persistent=persistent)
        return modules[""]
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"its model is none: {error!r}") from error
