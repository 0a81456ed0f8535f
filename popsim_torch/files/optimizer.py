"""An optimizer in a file: the name of its class, and its values as data."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from popsim_torch import logs, optim
from popsim_torch.errors import Error
from popsim_torch.files.parts import pack, unpack
from popsim_torch.files.values import Encoder
from popsim_torch.optim.planning import OptimizerSettings
from popsim_torch.optim.settings import is_traced
from popsim_torch.optim.step_source import StepSource

__all__ = ["pack_optimizer", "unpack_optimizer"]


_PART = "optimizer"
_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    **{f"poptorch.{k.__name__}": k for k in (optim.LAMB, optim.SGD, optim.Adam, optim.AdamW)},
    "poptorch.RMSprop": optim.RMSprop,
    **{
        f"torch.{kind.__name__}": kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    },
}


def pack_optimizer(
    optimizer: torch.optim.Optimizer, settings: OptimizerSettings, names: Mapping[int, str]
) -> dict[str, bytes]:
    """Return the sections of an optimizer.

    Args:
        optimizer: The user's optimizer, with its current state.
        settings: The values of the optimizer that are in use.
        names: Names of the model's parameters by ``id``.

    Raises:
        Error: A parameter is not in the model, or a value of a group is not plain data.
    """
    own = optimizer.__getstate__()
    host = torch.optim.Optimizer.state_dict(optimizer)
    value = {
        "class": _class_name(optimizer),
        "defaults": own["defaults"],
        "groups": host["param_groups"],
        "parameters": [_named(group["params"], names) for group in optimizer.param_groups],
        "host_state": host["state"],
        "attributes": _attributes(own),
        "settings": dataclasses.replace(
            settings,
            source=None,  # that of the reader's optimizer
            groups=tuple(dataclasses.replace(group, parameters=()) for group in settings.groups),
        ),
        "settings_parameters": [_named(group.parameters, names) for group in settings.groups],
    }
    return pack(_PART, value, "The optimizer")


def unpack_optimizer(
    sections: Mapping[str, bytes], module: nn.Module
) -> tuple[torch.optim.Optimizer, OptimizerSettings]:
    """Return the optimizer of a file, and the values of it that were in use.

    Args:
        sections: The sections of the file.
        module: The module with the parameters.

    Raises:
        ValueError: The sections contain no valid optimizer.
    """
    parameters = dict(nn.Module.named_parameters(module, remove_duplicate=False))
    try:
        value = unpack(sections, _PART)
        kind = _CLASSES[value["class"]]
        optimizer = kind.__new__(kind)
        groups = [
            {**group, "params": [parameters[name] for name in names]}
            for group, names in zip(value["groups"], value["parameters"], strict=True)
        ]
        flat = [parameter for group in groups for parameter in group["params"]]
        host_state = {flat[number]: state for number, state in value["host_state"].items()}
        optimizer.__setstate__(
            {
                **value["attributes"],
                "defaults": value["defaults"],
                "state": defaultdict(dict, host_state),
                "param_groups": groups,
            }
        )
        settings = value["settings"]
        found = tuple(
            dataclasses.replace(group, parameters=tuple(parameters[name] for name in names))
            for group, names in zip(settings.groups, value["settings_parameters"], strict=True)
        )
        source = StepSource.of(optimizer) if settings.rule.traced else None
        return optimizer, dataclasses.replace(settings, groups=found, source=source)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"its optimizer is none: {error!r}") from error


def _class_name(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of an optimizer's class, or of its base class that the device supports."""
    known = {kind: name for name, kind in _CLASSES.items()}
    found = next((known[base] for base in type(optimizer).__mro__ if base in known), None)
    if type(optimizer) not in known and is_traced(optimizer):
        found = None  # its base class does something else
    if found is None or found == "torch.Optimizer":
        raise Error(
            f"The optimizer is a {type(optimizer).__name__}: its class is code, which a file "
            "cannot hold. Save with export_model=False, and load the file with loadExecutable on "
            f"an executor of your own model and optimizer; or use one of {', '.join(_CLASSES)}."
        )
    if type(optimizer) not in known:
        logs.python.warning("The optimizer %s is saved as %s.", type(optimizer).__name__, found)
    return found


def _named(parameters: Sequence[torch.Tensor], names: Mapping[int, str]) -> list[str]:
    missing = [tuple(p.shape) for p in parameters if id(p) not in names]
    if missing:
        raise Error(
            f"The optimizer has a parameter of shape {missing[0]} that is not in the model. Make "
            "it from the parameters of the wrapped model."
        )
    return [names[id(parameter)] for parameter in parameters]


def _attributes(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the additional attributes of an optimizer that are plain data."""
    found = {}
    for name, value in own.items():
        if name in ("defaults", "state", "param_groups") or callable(value):
            continue
        try:
            Encoder()(value, f"The optimizer's attribute '{name}'")
        except Error as error:
            logs.python.warning("%s It is left out of the file.", error.message)
            continue
        found[name] = value
    return found
