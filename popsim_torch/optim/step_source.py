"""What the step of an optimizer is traced from: its class, groups and attributes at one time."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from popsim_torch.optim.base import Optimizer
from popsim_torch.optim.nested import Path, is_number, leaves
from popsim_torch.private_torch.optimizers import hooks_of_all_steps

__all__ = [
    "StepSource",
    "changes_step",
    "has_step_hooks",
    "is_initialised",
    "needs_closure",
    "note_own_hook",
    "replaced_step",
]

_TORCH = os.path.dirname(torch.__file__)
# What the traced step has its own of, or does not need.
_PARTS = frozenset({"param_groups", "state", "__getstate__"})
# What the optimizers of this package keep of the device.
_OF_DEVICE = frozenset(
    {"_device", "_ipu_param", "_ipu_state", "_pending", "_version", "variable_attrs"}
)
_NOT_VALUES = ("params", "initial_lr", "param_names")
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
# What a subclass may define without another update.
_HARMLESS = frozenset(
    {
        *("__init__", "__repr__", "__module__", "__doc__", "__qualname__", "__dict__"),
        *("__weakref__", "__annotations__", "__static_attributes__", "__firstlineno__"),
        *("add_param_group", "load_state_dict", "state_dict", "zero_grad", "__setstate__"),
        *("__getstate__", "__reduce__", "__parameters__", "__orig_bases__"),
    }
)
_own_hooks: weakref.WeakSet[Any] = weakref.WeakSet()


def note_own_hook(hook: Any) -> None:
    """Leave a hook of this package out of traced steps."""
    _own_hooks.add(hook)


def changes_step(kind: type[Any], base: type[Any]) -> bool:
    """Return whether a class updates weights in another way than its base class.

    Args:
        kind: The class.
        base: A class of PyTorch's or of this package that it is derived from, or the class itself.
    """
    if inspect.unwrap(kind.step) is not inspect.unwrap(base.step):
        return True
    for one in kind.__mro__:
        if one is base:
            return False
        changed = {name for name in vars(one) if hasattr(base, name)} - _HARMLESS - {"step"}
        if changed:
            return True
    return False


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the user has hooks of the step, which may change gradients and weights."""
    hooks = [hook for name in _HOOKS for hook in getattr(optimizer, name, {}).values()]
    hooks += [one for one in hooks_of_all_steps() if not _is_of_package(one)]
    return any(hook not in _own_hooks for hook in hooks)


def _is_of_package(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("popsim_torch.")


def replaced_step(optimizer: torch.optim.Optimizer) -> str:
    """Return where the user has replaced the step of one optimizer; nothing if nobody has.

    Schedulers do so, too, and only note that it is called.
    """
    function: Any = vars(optimizer).get("step")
    own = inspect.unwrap(type(optimizer).step)
    while function is not None:
        if isinstance(function, functools.partial):
            function = function.func
        function = getattr(function, "__func__", function)
        if function is own:
            return ""
        code = getattr(function, "__code__", None)
        if code is not None and not code.co_filename.startswith(_TORCH):
            return f"the function at {code.co_filename}:{code.co_firstlineno}"
        outer, function = function, getattr(function, "__wrapped__", None)
        if function is None:
            return f"a {type(outer).__name__}"
    return ""


def is_initialised(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the initialisation of PyTorch's base class has run."""
    return hasattr(optimizer, "defaults") and all(name in vars(optimizer) for name in _HOOKS)


def needs_closure(kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether a step needs a function that computes the loss again."""
    parameters = list(inspect.signature(inspect.unwrap(kind.step)).parameters.values())[1:]
    return any(
        one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        for one in parameters
    )


@dataclass(frozen=True, eq=False)
class StepSource:
    """An optimizer at one time.

    Attributes:
        kind: Its class.
        attributes: The attributes of the object, without groups and states.
        groups: The groups, without parameters; the last one has the defaults.
        states: The states of parameters on the host, by ``id``.
    """

    kind: type[torch.optim.Optimizer]
    attributes: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]
    states: Mapping[int, Mapping[str, Any]]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> StepSource:
        """Copy what a trace needs of an optimizer."""
        left_out = _PARTS | _OF_DEVICE if isinstance(optimizer, Optimizer) else _PARTS
        attributes = {
            name: value
            for name, value in vars(optimizer).items()
            # (A scheduler puts a function in place of the method ``step``.)
            if name not in left_out and not (name == "step" and callable(value))
        }
        for name in _HOOKS:
            hooks = attributes.get(name, {})
            kept = {key: hook for key, hook in hooks.items() if hook not in _own_hooks}
            attributes[name] = OrderedDict(kept)
        groups = [*optimizer.param_groups, optimizer.defaults]
        return cls(
            type(optimizer),
            attributes,
            [
                {key: copy.copy(value) for key, value in group.items() if key not in _NOT_VALUES}
                for group in groups
            ],
            {
                id(parameter): dict(state)
                for parameter, state in optimizer.state.items()
                if isinstance(parameter, torch.Tensor) and isinstance(state, dict)
            },
        )

    def numbers(self) -> dict[tuple[int, Path], float]:
        """Return the numbers of the groups by group and path: the hyper-parameters."""
        return {
            (index, path): float(leaf)
            for index, group in enumerate(self.groups)
            for path, leaf in leaves(dict(group))
            if _is_value(leaf)
        }

    def number(self, group: int, path: Path) -> Any:
        """Return a number or truth value of a group; None if it has none there."""
        found = dict(leaves(dict(self.groups[group]))).get(path)
        return found if _is_value(found) or isinstance(found, bool) else None

    def group_tensors(self) -> dict[Path, torch.Tensor]:
        """Return the tensors in groups that steps may have put there, by group and key."""
        return {
            (index, path): leaf
            for index, group in enumerate(self.groups)
            for path, leaf in leaves(dict(group))
            if len(path) == 1 and self._is_kept(path, leaf)
        }

    def _is_kept(self, path: Path, leaf: object) -> bool:
        return isinstance(leaf, torch.Tensor) and path[0] not in self.groups[-1]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that are attributes, by name."""
        return {
            name: value
            for name, value in self.attributes.items()
            if isinstance(value, torch.Tensor)
        }

    def structure(self) -> object:
        """Return a value that is equal for sources whose steps differ in numbers only.

        The numbers are those of groups, and those that attributes hold in tensors.
        """

        def of_group(path: Path, leaf: Any) -> object:
            is_number = _is_value(leaf) and not self._is_kept(path, leaf)
            return "number" if is_number else _described(leaf)

        groups = tuple(
            tuple((path, of_group(path, leaf)) for path, leaf in leaves(dict(group)))
            for group in self.groups
        )
        own = tuple(
            (name, path, _described(leaf))
            for name, value in self.attributes.items()
            if name not in (*_HOOKS, "_opt_called", "defaults") and not name.endswith("_hooks")
            for path, leaf in leaves(value)
        )
        hooks = tuple(tuple(map(_Same, self.attributes[name].values())) for name in _HOOKS)
        return groups, own, hooks


class _Same:
    """Equal if and only if the object is the same one, and still exists."""

    def __init__(self, value: object) -> None:
        self._hash = id(value)
        try:
            self._find: Callable[[], object] = weakref.ref(value)
        except TypeError:  # keeps it alive, so no other object takes its id
            self._find = lambda: value

    def __eq__(self, other: object) -> bool:
        found = self._find()
        return isinstance(other, _Same) and found is not None and other._find() is found

    def __hash__(self) -> int:
        return self._hash


def _described(leaf: Any) -> object:
    """Return a value that is equal for leaves with which a step computes the same."""
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype
    if isinstance(leaf, (str, bool, int, float, complex, bytes, torch.dtype, type(None))):
        return type(leaf), leaf
    return _Same(leaf)


def _is_value(leaf: object) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.numel() == 1 and not leaf.is_complex()
    return is_number(leaf)
