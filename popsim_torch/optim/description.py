"""The log lines that describe an optimizer: one for the defaults, and one for each group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from popsim_torch.optim.plan import HyperParameter
from popsim_torch.optim.settings import OptimizerSettings

_ITEMS = {
    "lr": "learningRate",
    "weight_decay": "weightDecay",
    "momentum": "momentum",
    "dampening": "dampening",
    "velocity_scaling": "velocityScaling",
    "nesterov": "nesterov",
    "beta1": "beta1",
    "beta2": "beta2",
    "eps": "eps",
    "alpha": "alpha",
    "max_weight_norm": "maxWeightNorm",
}


def describe(settings: OptimizerSettings, groups: Sequence[Sequence[str]]) -> list[str]:
    """Return the log lines for an optimizer.

    Args:
        settings: The values of the optimizer.
        groups: The names of each group's parameters.
    """
    type_name = settings.rule.type_name
    types = _types(settings)
    scaling = _item("lossScaling", settings.loss_scaling)
    defaults = ", ".join([*_items(settings, settings.defaults, "default"), scaling, *types])
    lines = [f"Updating graph optimizer with {type_name}, {defaults}"]
    for index, (group, parameters) in enumerate(zip(settings.groups, groups, strict=True)):
        items = ", ".join([*_items(settings, group.values), *types])
        lines.append(
            f"Updating group {index} optimizer with {type_name}, {items} "
            f"for (tensors affected {', '.join(parameters)})"
        )
    return lines


def _items(
    settings: OptimizerSettings, values: Mapping[str, HyperParameter], prefix: str = ""
) -> Iterable[str]:
    if settings.rule.type_name == "SGD2":  # stored velocities are multiplied by the loss scale
        values = {**values, "velocity_scaling": settings.loss_scaling}
    if settings.rule.traced:
        for name, value in values.items():
            yield _item(f"{prefix}{name[0].upper()}{name[1:]}" if prefix else name, value)
        return
    for attribute, name in _ITEMS.items():
        if attribute not in values:
            continue
        if prefix and attribute != "nesterov":
            name = f"{prefix}{name[0].upper()}{name[1:]}"
        yield _item(name, values[attribute])


def _item(name: str, value: HyperParameter) -> str:
    return f"{name}={value.value:g}{' (const)' if value.constant else ''}"


def _types(settings: OptimizerSettings) -> list[str]:
    rule = settings.rule
    items = [f"accumType={_type(rule.accum_type)}"]
    if rule.traced:
        return items
    if rule.type_name in ("SGD1", "SGD2"):
        items.append(f"firstOrderMomentumAccumType={_type(rule.velocity_accum_type)}")
    else:
        items.append(f"firstOrderMomentumAccumType={_type(rule.first_type)}")
        items.append(f"secondOrderMomentumAccumType={_type(rule.second_type)}")
    if rule.type_name == "RMSPROP":
        items.append(f"useTfVariant={rule.tf_variant:d}")
    elif rule.type_name != "LAMB":
        norm = float("inf") if rule.max_grad_norm is None else rule.max_grad_norm
        items.append(f"maxGradNorm={norm:g}")
    return items


def _type(dtype: torch.dtype | None) -> str:
    """Return the name of a dtype; None means the dtype of the weight."""
    return {torch.float32: "FLOAT", torch.float16: "FLOAT16", None: "UNDEFINED"}[dtype]
