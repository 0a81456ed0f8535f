"""Copies the values of an optimizer at one moment.

A model reads its optimizer when it is wrapped and in ``setOptimizer``; changes of the object in
between have no effect.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import numbers
from collections.abc import Collection, Mapping
from typing import Any

import torch

from popsim_torch.errors import Error, UsageAssertionError, UsageValueError
from popsim_torch.optim import optimizers as optim
from popsim_torch.optim.captures import unwrapped
from popsim_torch.optim.nested import path_name
from popsim_torch.optim.plan import HyperParameter
from popsim_torch.optim.rules import Rule
from popsim_torch.optim.step_source import (
    StepSource,
    changes_step,
    has_step_hooks,
    needs_closure,
)
from popsim_torch.optim.usable import check_usable

__all__ = [
    "AttributeRecord",
    "GroupSettings",
    "OptimizerSettings",
    "is_traced",
    "read_optimizer",
    "structure_of",
]

_logger = logging.getLogger("poptorch::python")

# Hyper-parameters of each optimizer type, by their names in the groups. ``betas`` is read as
# ``beta1`` and ``beta2``.
_ADAM_NAMES = ("lr", "betas", "eps", "weight_decay")
_SGD_NAMES = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
_NAMES = {
    "SGD1": (*_SGD_NAMES, "velocity_scaling"),
    "SGD2": _SGD_NAMES,
    "ADAM": _ADAM_NAMES,
    "ADAMW": _ADAM_NAMES,
    "LAMB": (*_ADAM_NAMES, "max_weight_norm"),
    "RMSPROP": ("lr", "alpha", "eps", "weight_decay", "momentum"),
}
_STRUCTURAL = ("nesterov",)

_KNOWN_CLASSES = {
    *(optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.LAMB),
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop),
}


# What `load_state_dict` of PyTorch adds to the defaults.
_OF_LOADING = frozenset({"differentiable"})


@dataclasses.dataclass(frozen=True)
class AttributeRecord:
    """The names of an optimizer's attributes, to detect new ones later.

    Attributes:
        type_name: The name of the optimizer type in messages.
        object_names: Attributes of the object.
        default_names: Keys of its ``defaults``.
        group_names: Keys of each group.
    """

    type_name: str
    object_names: frozenset[str]
    default_names: frozenset[str]
    group_names: tuple[frozenset[str], ...]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, type_name: str) -> AttributeRecord:
        """Record the attributes that ``optimizer`` has now."""
        # Skip private names, which are torch's, and methods, which are wrappers of schedulers.
        visible = (
            name
            for name, value in vars(optimizer).items()
            if not name.startswith("_") and not callable(value)
        )
        return cls(
            type_name,
            frozenset(visible),
            frozenset(optimizer.defaults) - _OF_LOADING,
            tuple(frozenset(group) for group in optimizer.param_groups),
        )

    def knowing(self, names: Collection[str]) -> AttributeRecord:
        """Return a record with more keys in each group."""
        groups = tuple(known.union(names) for known in self.group_names)
        return dataclasses.replace(self, group_names=groups)

    def joined(self, later: AttributeRecord, *, relax_checks: bool) -> AttributeRecord:
        """Report names that are new in a later record, and return both records together.

        Args:
            later: A record of the same optimizer, or of one of the same type that replaces it.
            relax_checks: Whether to report at level DEBUG instead of WARNING.
        """
        pairs = [
            ("optimizer attribute", self.object_names, later.object_names),
            ("default group variable", self.default_names, later.default_names),
        ]
        known_groups = list(self.group_names[: len(later.group_names)])
        known_groups += list(later.group_names[len(known_groups) :])
        for index, (known, names) in enumerate(zip(known_groups, later.group_names, strict=True)):
            pairs.append((f"group {index} attribute", known, names))
        for kind, known, names in pairs:
            if unexpected := sorted(names - known):
                _logger.log(
                    logging.DEBUG if relax_checks else logging.WARNING,
                    "Ignoring unexpected %s in %s optimizer: %s",
                    *(kind, self.type_name, unexpected),
                )
        groups = zip(known_groups, later.group_names, strict=True)
        return AttributeRecord(
            self.type_name,
            self.object_names | later.object_names,
            self.default_names | later.default_names,
            tuple(known | names for known, names in groups),
        )


Values = Mapping[str, HyperParameter]
"""Hyper-parameters by attribute name."""


@dataclasses.dataclass(frozen=True)
class GroupSettings:
    """A parameter group at the time when the optimizer was read.

    Attributes:
        parameters: The parameters, which are identified by object.
        values: The hyper-parameters, by attribute name.
        names: The names of the parameters, if the optimizer knows them.
    """

    parameters: tuple[torch.Tensor, ...]
    values: Values
    names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """A copy of everything that a model needs of an optimizer.

    Attributes:
        rule: Structure of the optimizer.
        loss_scaling: Factor of the loss.
        defaults: Hyper-parameters of parameters in no group, by attribute name.
        groups: The parameter groups.
        attributes: Names of the optimizer's attributes, for the next ``read_optimizer``.
        source: What its step is traced from, if it has no update op.
        trains_all: Whether parameters in no group are trained with the defaults, as in PopTorch;
            those of PyTorch's optimizers stay as they are.
    """

    rule: Rule
    loss_scaling: HyperParameter
    defaults: Values
    groups: tuple[GroupSettings, ...]
    attributes: AttributeRecord
    source: StepSource | None = dataclasses.field(default=None, compare=False)
    trains_all: bool = False

    def as_constant_as(self, other: OptimizerSettings) -> OptimizerSettings:
        """Return these values, with the same ones constant as in other settings."""

        def values(own: Values, others: Values) -> Values:
            return {
                name: dataclasses.replace(value, constant=others.get(name, value).constant)
                for name, value in own.items()
            }

        # (a group without a counterpart cannot replace another one)
        known = [*other.groups[: len(self.groups)], *self.groups[len(other.groups) :]]
        return dataclasses.replace(
            self,
            loss_scaling=dataclasses.replace(
                self.loss_scaling, constant=other.loss_scaling.constant
            ),
            defaults=values(self.defaults, other.defaults),
            groups=tuple(
                dataclasses.replace(own, values=values(own.values, one.values))
                for own, one in zip(self.groups, known, strict=True)
            ),
        )

    @property
    def forces_running_mean(self) -> bool:
        """Whether accumulators must hold the running mean, because sums in half precision overflow.

        A model with Mean reduction and without an explicit strategy then changes to Running; a
        model that is already compiled must refuse such an optimizer.
        """
        return not self.rule.combined and self.rule.accum_type == torch.float16


def read_optimizer(
    optimizer: torch.optim.Optimizer,
    *,
    automatic_loss_scaling: bool = False,
    relax_checks: bool = False,
    known_attributes: AttributeRecord | None = None,
) -> OptimizerSettings:
    """Copy an optimizer's values.

    Args:
        optimizer: Any optimizer, or a wrapper of one. Those without an update op of the device are
            traced later.
        automatic_loss_scaling: Whether the loss scale changes while the program runs.
        relax_checks: Whether to report unexpected attributes at level DEBUG instead of WARNING.
        known_attributes: ``attributes`` of the settings that are replaced; None for the first
            optimizer of a model.

    Raises:
        AssertionError: The type is not supported, or a value is not a number.
        ValueError: An optimizer of ``poptorch.optim`` uses amsgrad.
    """
    optimizer, _ = unwrapped(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageAssertionError(
            f"Unsupported optimizer type {type(optimizer).__name__}: pass an object of a class "
            "that is derived from torch.optim.Optimizer."
        )
    check_usable(optimizer)
    rule = _read_rule(optimizer)
    if not rule.traced:
        _warn_of_subclass(optimizer, rule.type_name)
    if known_attributes is not None and known_attributes.type_name != rule.type_name:
        known_attributes = None  # attributes of another type cannot be compared
    if known_attributes is None:
        _warn_of_ignored(optimizer)
        if not rule.traced:
            _warn_of_dampening(optimizer)
    attributes = AttributeRecord.of(optimizer, rule.type_name)
    if known_attributes is not None:
        attributes = known_attributes.joined(attributes, relax_checks=relax_checks)
    loss_scaling = _number("loss_scaling", getattr(optimizer, "loss_scaling", 1.0))
    scale_is_constant = not isinstance(
        optimizer, optim.Optimizer
    ) or optimizer.variable_attrs.isConstant("loss_scaling")
    scaling = HyperParameter(loss_scaling, scale_is_constant and not automatic_loss_scaling)
    if rule.traced:
        return _settings_of_source(optimizer, rule, scaling, attributes)
    reader = _ValueReader(optimizer, rule.type_name)
    return OptimizerSettings(
        rule,
        scaling,
        reader.values(optimizer.defaults),
        tuple(
            GroupSettings(tuple(group["params"]), reader.values({**optimizer.defaults, **group}))
            for group in optimizer.param_groups
        ),
        attributes,
        trains_all=isinstance(optimizer, optim.Optimizer),
    )


def _settings_of_source(
    optimizer: torch.optim.Optimizer,
    rule: Rule,
    scaling: HyperParameter,
    attributes: AttributeRecord,
) -> OptimizerSettings:
    """Return the settings of an optimizer whose step is traced: all its numbers are variable."""
    source = StepSource.of(optimizer)
    values: list[dict[str, HyperParameter]] = [{} for _ in source.groups]
    for (index, path), value in source.numbers().items():
        values[index][path_name(path)] = HyperParameter(value, constant=False)
    *of_groups, defaults = values
    pairs = zip(optimizer.param_groups, of_groups, strict=True)
    groups = tuple(
        GroupSettings(tuple(group["params"]), own, tuple(group.get("param_names", ())))
        for group, own in pairs
    )
    return OptimizerSettings(rule, scaling, defaults, groups, attributes, source)


class _ValueReader:
    """Reads the hyper-parameters of an optimizer's groups; all groups have the same constants."""

    def __init__(self, optimizer: torch.optim.Optimizer, type_name: str) -> None:
        self._optimizer = optimizer
        self._type_name = type_name
        self._constant = {name: self._is_constant(name) for name in _NAMES[type_name]}

    def values(self, group: Mapping[str, Any]) -> dict[str, HyperParameter]:
        """Return the hyper-parameters of a group, complete with the defaults."""
        found = {}
        for name, constant in self._constant.items():
            value = group[name]
            if name != "betas":
                found[name] = HyperParameter(_number(name, value), constant)
                continue
            if not isinstance(value, tuple | list) or len(value) != 2:
                raise UsageAssertionError(f"Expected a pair of numbers for betas, got {value!r}.")
            for index, beta in enumerate(value, start=1):
                found[f"beta{index}"] = HyperParameter(_number("betas", beta), constant)
        return found

    def _is_constant(self, name: str) -> bool:
        if isinstance(self._optimizer, optim.Optimizer):
            return name in _STRUCTURAL or self._optimizer.variable_attrs.isConstant(name)
        # All others are variable, because PyTorch's schedulers may change them.
        return name in _STRUCTURAL or (name == "momentum" and not _has_momentum(self._optimizer))


def _has_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a torch optimizer has momentum: if not, it needs no memory for velocities."""
    return any(group.get("momentum") for group in (optimizer.defaults, *optimizer.param_groups))


def structure_of(optimizer: torch.optim.Optimizer) -> list[object]:
    """Return the structure that a program is compiled for; equal if only values differ.

    A ``poptorch.optim`` optimizer chooses its constants itself, so its structure is only the
    parameters.

    Args:
        optimizer: As for ``read_optimizer``.
    """
    optimizer, _ = unwrapped(optimizer)
    groups = optimizer.param_groups
    structure: list[object] = [[id(parameter) for parameter in g["params"]] for g in groups]
    if is_traced(optimizer):
        return [*structure, StepSource.of(optimizer).structure()]
    if not isinstance(optimizer, optim.Optimizer):
        structure.append(_has_momentum(optimizer))
        names = ("nesterov", "centered", "decoupled_weight_decay")
        structure += [tuple(bool(group.get(name)) for name in names) for group in groups]
    return structure


def _number(name: str, value: object) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value.detach())  # PyTorch's optimizers take a tensor as lr
    if not isinstance(value, numbers.Real):
        raise UsageAssertionError(
            f"Expected a number for {name}, got {value!r} of type {type(value).__name__}."
        )
    return float(value)


_NATIVE = (
    *(optim.AdamW, optim.Adam, optim.SGD, optim.RMSprop, optim.LAMB),
    # AdamW must come first: in torch it is a subclass of Adam.
    *(torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop),
)


def _base_of(optimizer: torch.optim.Optimizer) -> type[Any] | None:
    """Return the class with an update op of the device that an optimizer is an instance of."""
    return next((kind for kind in _NATIVE if isinstance(optimizer, kind)), None)


def is_traced(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's own step is traced, because no update op does the same."""
    base = _base_of(optimizer)
    if base is None or changes_step(type(optimizer), base) or has_step_hooks(optimizer):
        return True
    if isinstance(optimizer, optim.Optimizer):
        return False
    groups = (optimizer.defaults, *optimizer.param_groups)
    return any(
        group.get("amsgrad") or group.get("maximize") or group.get("base_momentum") == 0
        for group in groups
    ) or any(len(_switches(optimizer, name)) > 1 for name in ("centered", "decoupled_weight_decay"))


def _switches(optimizer: torch.optim.Optimizer, name: str) -> set[bool]:
    """Return the truth values that groups have for a name."""
    return {bool(group.get(name)) for group in optimizer.param_groups}


def _warn_of_dampening(optimizer: torch.optim.Optimizer) -> None:
    """Warn of dampening in an optimizer of PyTorch's, whose first step is another one there."""
    if isinstance(optimizer, optim.Optimizer):
        return
    if any(group.get("dampening") and group.get("momentum") for group in optimizer.param_groups):
        _logger.warning(
            "SGD: dampening applies from the first step on, as in PopTorch. In eager PyTorch the "
            "momentum begins with the whole gradient, so the weights differ from the first step "
            "on. For its rule, add a hook, optimizer.register_step_post_hook(lambda *_: None): "
            "then the device does what the optimizer's own step does."
        )


def _check_traceable(optimizer: torch.optim.Optimizer) -> None:
    """Refuse optimizers that a program of the device cannot step.

    Raises:
        AssertionError: The optimizer is one of them; the message says why.
    """
    kind = type(optimizer)
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UsageAssertionError(
            "Unsupported optimizer type SparseAdam: gradients on the device are dense. Use Adam."
        )
    if needs_closure(kind):
        raise UsageAssertionError(
            f"Unsupported optimizer type {kind.__name__}: its step calls a closure that computes "
            "the loss again, as often as the values require. A program of the device computes each "
            "loss once. Use an optimizer whose step() needs no closure."
        )


def _type_name(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of the optimizer type in messages."""
    if isinstance(optimizer, torch.optim.Adam) and not isinstance(optimizer, optim.Optimizer):
        # (is_traced has found that all groups agree)
        return "ADAMW" if True in _switches(optimizer, "decoupled_weight_decay") else "ADAM"
    if isinstance(optimizer, torch.optim.AdamW):
        return "ADAMW"
    if isinstance(optimizer, torch.optim.Adam):
        return "ADAM"
    if isinstance(optimizer, torch.optim.SGD):
        return "SGD1" if getattr(optimizer, "use_combined_accum", False) else "SGD2"
    return "RMSPROP" if isinstance(optimizer, torch.optim.RMSprop) else "LAMB"


def _read_rule(optimizer: torch.optim.Optimizer) -> Rule:
    if is_traced(optimizer):
        _check_traceable(optimizer)
        accumulates_in = getattr(optimizer, "accum_type", torch.float32)
        assert isinstance(accumulates_in, torch.dtype)
        return Rule(type(optimizer).__name__, accumulates_in, traced=True)
    type_name = _type_name(optimizer)
    if any(group.get("amsgrad") for group in (optimizer.defaults, *optimizer.param_groups)):
        raise UsageValueError("Only non-amsgrad Adam/AdamW optimizers are supported.")
    centered = {bool(group.get("centered")) for group in optimizer.param_groups}
    if len(centered) > 1:
        raise UsageAssertionError("All parameter groups must have the same value of centered.")
    combined = type_name == "SGD1"

    def element_type(name: str) -> torch.dtype:
        dtype = getattr(optimizer, name, torch.float32)
        assert isinstance(dtype, torch.dtype)
        return dtype

    return Rule(
        type_name,
        None if combined else element_type("accum_type"),
        None if combined else element_type("velocity_accum_type"),
        element_type("first_order_momentum_accum_type"),
        element_type("second_order_momentum_accum_type"),
        _max_grad_norm(optimizer),
        type_name != "LAMB" or bool(getattr(optimizer, "bias_correction", True)),
        centered.pop(),
        bool(getattr(optimizer, "use_tf_variant", False)),
        counts=type_name == "RMSPROP" and not isinstance(optimizer, optim.Optimizer),
    )


def _max_grad_norm(optimizer: torch.optim.Optimizer) -> float | None:
    value = getattr(optimizer, "max_grad_norm", None)
    if value is None:
        return None
    norm = _number("max_grad_norm", value)
    if math.isnan(norm) or norm < 0:
        raise Error(f"max_grad_norm must be a number of at least 0, got {norm}.")
    return None if math.isinf(norm) else norm


def _warn_of_subclass(optimizer: torch.optim.Optimizer, type_name: str) -> None:
    """Warn of an update rule in a subclass, which the device does not run."""
    if type(optimizer) not in _KNOWN_CLASSES:
        _logger.warning(
            "%s is a subclass of a supported optimizer. The device does not run Python optimizer "
            "code directly; it updates the weights as %s does.",
            *(type(optimizer).__name__, type_name),
        )


def _warn_of_ignored(optimizer: torch.optim.Optimizer) -> None:
    """Warn of settings that the device ignores."""
    if any("loss_scaling" in group for group in optimizer.param_groups):
        _logger.warning(
            "loss_scaling in a parameter group is ignored; there is one loss scaling per model. "
            "Pass it to the optimizer."
        )
    if any(group.get("maximize") for group in optimizer.param_groups) and not is_traced(optimizer):
        _logger.warning(
            "maximize=True is ignored on the device, which always minimises. Negate the loss."
        )
