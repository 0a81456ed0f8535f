"""Rebuilds an optimizer for the tensors of a trace."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from popsim_torch.errors import Error
from popsim_torch.optim.nested import Path, is_number, is_truth, leaves, mapped, put
from popsim_torch.optim.step_source import StepSource
from popsim_torch.optimizer_steps.held import is_same, is_same_content
from popsim_torch.optimizer_steps.noting import NotingDict
from popsim_torch.optimizer_steps.numbers import StepNumber, StepTruth
from popsim_torch.trace.former_values import mentions, methods_of
from popsim_torch.trace.graph.origin import user_line

__all__ = [
    "Slot",
    "changed_attribute",
    "changed_attributes",
    "check_attributes",
    "check_containers",
    "rebuilt",
]

# Groups say how to compute: what a program decides itself.
_WAYS = ("foreach", "fused", "capturable", "differentiable")


_CONTAINERS = (list, dict, set, deque)


@dataclass(frozen=True)
class Slot:
    """A parameter of a traced step.

    Attributes:
        group: The number of its group.
        shape: Its shape.
        dtype: Its dtype on the device.
        attributes: The numbers, texts and truth values that the user has put on the parameter.
        name: Its name, if the step reads names of parameters.
    """

    group: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    attributes: tuple[tuple[str, Any], ...] = ()
    name: str = ""


def rebuilt(
    source: StepSource,
    slots: Sequence[Slot],
    weights: Sequence[torch.Tensor],
    values: Mapping[tuple[int, Path], StepNumber | StepTruth | torch.Tensor],
    attributes: Mapping[Path, Any],
    states: dict[Any, Any],
    names: Sequence[str],
) -> torch.optim.Optimizer:
    """Return a copy of an optimizer for tensors of a trace.

    Args:
        source: The optimizer.
        slots: The parameters.
        weights: The tensor of each parameter.
        values: The numbers of the groups, and the tensors that steps keep there.
        attributes: Values in place of those of attributes, by name.
        states: The states.
        names: The names of the parameters; empty where the optimizer does not know them.
    """
    optimizer: Any = object.__new__(source.kind)
    kind = source.kind.__name__
    vars(optimizer).update({name: _apart(one, kind) for name, one in source.attributes.items()})
    for path, value in attributes.items():
        vars(optimizer)[path[0]] = value
    optimizer.state = states
    optimizer.param_groups = []
    for index in dict.fromkeys(slot.group for slot in slots):

        def entry(path: Path, leaf: Any, index: int = index) -> Any:
            return values.get((index, path), leaf)

        group = mapped(dict(source.groups[index]), entry)
        known = {path for path, _ in leaves(group)}
        for (owner, path), value in values.items():
            if owner == index and path not in known:  # the last step has added it
                put(group, path, value)
        pairs = zip(slots, weights, strict=True)
        group["params"] = [weight for slot, weight in pairs if slot.group == index]
        named = [name for slot, name in zip(slots, names, strict=True) if slot.group == index]
        if any(named):
            group["param_names"] = named
        # One tensor after the other: the program is what makes them run together.
        group |= {key: False for key in _WAYS if key in group}
        optimizer.param_groups.append(NotingDict(group))
    return optimizer  # type: ignore[no-any-return]


def changed_attributes(before: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> list[Path]:
    """Return the attributes of a copy whose numbers and truth values its step has changed.

    Args:
        before: The attributes before the step.
        optimizer: The copy that has made the step.
    """
    changed: list[Path] = []
    for name, value in vars(optimizer).items():
        if name == "defaults":
            continue
        if name not in before:
            changed += [(name,)] * (is_number(value) or is_truth(value))
            continue
        old = before[name]
        if value is old or (type(value) is type(old) in (bool, int, float) and value == old):
            continue
        if (is_number(value) and is_number(old)) or (is_truth(value) and is_truth(old)):
            changed.append((name,))
    return changed


def changed_attribute(
    before: Mapping[str, Any], optimizer: torch.optim.Optimizer, missed: Collection[str]
) -> str:
    """Return the name of an attribute that a step has set to what the device does not keep.

    Args:
        before: The attributes before the step.
        optimizer: The copy that has made the step.
        missed: The attributes that the step has looked for in vain.
    """
    numbers = {path[0] for path in changed_attributes(before, optimizer)}
    now = vars(optimizer)
    for name, value in now.items():
        old = before.get(name)
        if name in numbers or (name not in before and name not in missed):
            continue
        kept = isinstance(value, torch.Tensor) and isinstance(old, torch.Tensor)
        if kept:
            continue
        if value is not old and isinstance(value, _CONTAINERS) and type(value) is _plain_type(old):
            if is_same_content(old, value):
                continue
            return f"self.{name}"
        if name not in before or not is_same(old, value):
            return f"self.{name}"
    return "".join(f"self.{name}" for name in sorted(before.keys() - now.keys())[:1])


def _plain_type(value: object) -> type[Any]:
    return dict if isinstance(value, NotingDict) else type(value)


class _Spent:
    """Stands for an iterator that is an attribute: only Python can advance it.

    Args:
        name: What to call it.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __iter__(self) -> _Spent:
        return self

    def __next__(self) -> Any:
        raise Error(
            f"The step of {self._name} takes the next value of an iterator{user_line(' at ')}. A "
            "step runs on the device, which cannot do that. Compute the value from a number that "
            "is an attribute or in a group (self.count += 1), or set it in the group before "
            "setOptimizer, as schedulers do."
        )


def _apart(value: Any, name: str) -> Any:
    """Return a copy of a container, with the same content: a traced step must not fill it."""
    if type(value) is list:
        return [_apart(item, name) for item in value]
    if isinstance(value, Iterator) and not isinstance(value, io.IOBase):
        return _Spent(name)
    if type(value) is dict:
        return NotingDict({key: _apart(item, name) for key, item in value.items()})
    return copy.copy(value) if isinstance(value, (set, deque, OrderedDict, defaultdict)) else value


def _plain(value: Any) -> Any:
    return dict(dict.items(value)) if isinstance(value, dict) else list(value)


def check_containers(source: StepSource, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a step that has filled a container which is an attribute.

    Args:
        source: The optimizer before the step.
        optimizer: The copy that has made the step.

    Raises:
        Error: The container holds tensors of the trace, or it grows.
    """
    for name, value in vars(optimizer).items():
        if name in ("state", "param_groups", "defaults") or not isinstance(value, _CONTAINERS):
            continue
        before = source.attributes.get(name)
        held = [leaf for _, leaf in leaves(_plain(value))]
        tensors = any(isinstance(leaf, torch.Tensor) for leaf in held)
        grows = not isinstance(value, dict) and len(value) != len(before or ())
        if tensors or grows:
            raise Error(
                f"The step of {source.kind.__name__} changes its attribute '{name}', a "
                f"{type(value).__name__}: it {'keeps tensors' if tensors else 'grows'} there. On "
                "the device, what a step leaves to the next one has fixed names and shapes. Keep "
                "it in self.state[parameter], as tensors that the first step makes; for the last n "
                "gradients, one tensor with n rows and a count."
            )


def check_attributes(source: StepSource, parameters: Sequence[torch.Tensor]) -> None:
    """Refuse an optimizer that keeps tensors of its model in attributes.

    Raises:
        Error: A step of a copy would change the original tensors, or would not find its own.
    """
    own = {id(parameter) for parameter in parameters}
    for name, value in source.attributes.items():
        if any(isinstance(leaf, torch.optim.Optimizer) for _, leaf in leaves(value)):
            raise Error(
                f"{source.kind.__name__} keeps another optimizer in its attribute '{name}', whose "
                "step would change the weights of the host, not those of the device. Derive "
                f"{source.kind.__name__} from the class of that optimizer, and call super().step()."
            )
        if any(isinstance(leaf, LRScheduler) for _, leaf in leaves(value)):
            raise Error(
                f"{source.kind.__name__} keeps a scheduler in its attribute '{name}'. A scheduler "
                "changes the groups of the host, while the step runs on the device. Keep it "
                "elsewhere, and call scheduler.step() and setOptimizer between the calls of the "
                "model."
            )
        for path, leaf in leaves(value):
            if _has_module(leaf, own) and _is_used(source.kind, name):
                raise Error(
                    f"{source.kind.__name__} keeps the model in its attribute '{name}', and uses "
                    "it. Its step is traced with other tensors in place of the parameters: it must "
                    "take them from self.param_groups, and their names from 'param_names' of a "
                    "group (pass model.named_parameters())."
                )
            if _has_ids(path, leaf, own):
                raise Error(
                    f"{source.kind.__name__} keeps the ids of parameters in its attribute "
                    f"'{name}'. Its step is traced with other tensors in place of them: give "
                    "parameters with another update a group of their own, or set an attribute on "
                    "them (p.decays = False)."
                )
            if not isinstance(leaf, torch.Tensor) or name == "defaults":
                continue
            if path and id(leaf) not in own:
                raise Error(
                    f"{source.kind.__name__} keeps a tensor inside of its attribute '{name}', "
                    f"{'a list' if isinstance(value, list) else 'a container'}. The device knows "
                    "tensors in self.state, and those that are attributes themselves. Keep it in "
                    "self.state[parameter]."
                )
            if id(leaf) in own:
                raise Error(
                    f"{source.kind.__name__} keeps parameters in its attribute '{name}'. Its step "
                    "is traced with other tensors in place of them: it must take them from "
                    "self.param_groups."
                )


def _has_module(leaf: object, parameters: Collection[int]) -> bool:
    """Return whether a value is a module with some of the parameters, which are given by id."""
    return isinstance(leaf, nn.Module) and any(id(one) in parameters for one in leaf.parameters())


def _has_ids(path: Path, leaf: object, parameters: Collection[int]) -> bool:
    """Return whether a value, a member of a set, or a key of a dict is the id of a parameter."""
    members = leaf if isinstance(leaf, (set, frozenset)) else (leaf,)
    return any(type(one) is int and one in parameters for one in (*path, *members))


def _is_used(kind: type[torch.optim.Optimizer], name: str) -> bool:
    """Return whether code besides the initialisation looks at an attribute."""
    methods = methods_of(kind).items()
    return any(
        mentions(one, name) for method, codes in methods if method != "__init__" for one in codes
    )
