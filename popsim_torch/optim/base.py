"""The common part of PopTorch's optimizers: variable attributes, and state on a device."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeAlias, overload

import torch

from popsim_torch.errors import Error, UsageAssertionError, UsageRuntimeError, UsageValueError

_logger = logging.getLogger("poptorch::python")

__all__ = ["AccumulationType", "DeviceLink", "Optimizer", "VariableAttributes", "accumulation_type"]

Tensors: TypeAlias = dict[str, torch.Tensor]

_ACCUM_TYPES = (torch.float16, torch.float32)
_ACCUM_TYPES_MESSAGE = "Accumulation types must be either torch.float32 or torch.float16"


class DeviceLink(Protocol):
    """The interface of the executor that runs an optimizer's updates."""

    def version(self) -> object:
        """Return a value that changes whenever state or scalars may have changed."""

    def read_state(self) -> Tensors:
        """Return the state tensors (``Accl___w``, ``Step___w``, ...) on the CPU, by name."""

    def read_parameters(self) -> Tensors:
        """Return the variable scalars in their derived form on the CPU, by name."""

    def check_state(self, tensors: Tensors) -> None:
        """Raise ``Error`` for states and scalars that ``write_state`` would not accept."""

    def write_state(self, tensors: Tensors) -> None:
        """Set states and scalars, by name.

        Names that the program does not have are ignored. States of the program that are missing
        keep their value, with a warning.
        """


class VariableAttributes:
    """Stores which hyper-parameters of an optimizer can change after compilation.

    Args:
        variable_attributes: The names of the variable hyper-parameters.
        allowed_attributes: The names of all hyper-parameters.
    """

    def __init__(
        self, variable_attributes: Iterable[str], allowed_attributes: Iterable[str]
    ) -> None:
        self._variable = set(variable_attributes)
        self._allowed = set(allowed_attributes)

    def isConstant(self, attr: str) -> bool:
        """Return whether an attribute is part of the compiled program.

        Args:
            attr: Name of a hyper-parameter.

        Raises:
            AssertionError: The optimizer has no such attribute.
        """
        self._check(attr)
        return attr not in self._variable

    def markAsConstant(self, attr: str) -> None:
        """Make an attribute part of the program; call this before compilation.

        Args:
            attr: Name of a hyper-parameter.

        Raises:
            AssertionError: The optimizer has no such attribute.
        """
        self._check(attr)
        self._variable.discard(attr)

    def markAsVariable(self, attr: str) -> None:
        """Allow an attribute to change after compilation; call this before compilation.

        Args:
            attr: Name of a hyper-parameter.

        Raises:
            AssertionError: The optimizer has no such attribute.
        """
        self._check(attr)
        self._variable.add(attr)

    def _check(self, attr: str) -> None:
        if attr not in self._allowed:
            raise UsageAssertionError(
                f"Unknown attribute {attr!r}. This optimizer has {sorted(self._allowed)}."
            )


class AccumulationType:
    """A descriptor for the dtype of a state: float16 or float32."""

    def __init__(self, description: str) -> None:
        self.__doc__ = f"{description}: float16 or float32."

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    @overload
    def __get__(self, instance: None, owner: type) -> AccumulationType: ...
    @overload
    def __get__(self, instance: object, owner: type) -> torch.dtype: ...
    def __get__(self, instance: object | None, owner: type) -> torch.dtype | AccumulationType:
        if instance is None:
            return self
        value: torch.dtype = getattr(instance, self._name)
        return value

    def __set__(self, instance: object, value: torch.dtype) -> None:
        if value not in _ACCUM_TYPES:
            raise UsageValueError(f"{_ACCUM_TYPES_MESSAGE}, got {value}.")
        setattr(instance, self._name, value)


def accumulation_type(name: str, value: torch.dtype | None) -> torch.dtype:
    """Return the dtype that was passed to a constructor, or the default."""
    if value is None:
        return torch.float32
    if value not in _ACCUM_TYPES:
        raise UsageAssertionError(f"{_ACCUM_TYPES_MESSAGE}, got {value} for {name}.")
    return value


class Optimizer(torch.optim.Optimizer):
    """The base of all poptorch optimizers; a mix-in before a torch optimizer."""

    variable_attrs: VariableAttributes
    """The hyper-parameters that can change after compilation."""
    loss_scaling: float
    """Multiplies the loss before the backward pass; the update divides by it."""

    _device: DeviceLink | None = None
    # The result of state_dict() while no device is linked. None: never compiled.
    _ipu_state: Tensors | None = None
    _ipu_param: Tensors | None = None
    # Loaded state that the device, or the next one, does not have yet.
    _pending: Tensors | None = None
    # The device's version at the last read-back.
    _version: object = None

    def _set_common(self, variable: Iterable[str], loss_scaling: float | None) -> None:
        """Set the common attributes; must be called after torch's constructor.

        Args:
            variable: The names of the hyper-parameters that were given explicitly.
            loss_scaling: The argument of the constructor.
        """
        allowed = {*self.defaults, "loss_scaling"}
        names = {*variable, *(["loss_scaling"] if loss_scaling is not None else [])}
        self.variable_attrs = VariableAttributes(names, allowed)
        self.loss_scaling = 1.0 if loss_scaling is None else loss_scaling

    def _link(self, device: DeviceLink) -> None:
        """Connect to the executor that runs the updates, and pass on loaded state, if any."""
        if self._pending is not None:
            device.write_state(self._pending)
            self._pending = None
        self._device, self._version = device, None

    def _hand_over(self) -> None:
        """Pass loaded state to the device, if the device does not have it yet."""
        if self._device is not None and self._pending is not None:
            self._device.write_state(self._pending)
            self._pending = None

    def _unlink(self) -> None:
        """Read the state back from the executor, and drop the link to it.

        The next executor gets the state, but not the scalars, because the attributes may have other
        values by then.
        """
        if self._device is None:
            return
        self._hand_over()
        self._read_back()
        self._device = None
        self._pending = self._ipu_state or None

    def _read_back(self) -> None:
        """Copy state and scalars from the device, if they may differ from the copies here."""
        if self._device is None or self._pending is not None:
            return
        version = self._device.version()
        if version == self._version:
            _logger.debug("Using cached optimiser state dict")
            return
        self._ipu_state = self._device.read_state()
        self._ipu_param = self._device.read_parameters()
        self._version = version

    def state_dict(self) -> dict[str, Any]:
        """Return torch's dictionary, and the state of the device.

        Returns:
            ``state`` and ``param_groups`` as in torch; ``ipu_state``: CPU tensors by name, such as
            ``Accl1___fc.weight``; ``ipu_param``: the variable hyper-parameters in the device's
            form, by name. The last two are None before the first compilation.
        """
        self._read_back()
        return {
            "ipu_state": _copied(self._ipu_state),
            "ipu_param": _copied(self._ipu_param),
            **super().state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a result of ``state_dict``, before or after compilation.

        The groups change at once, the device's tensors at the next run or ``setOptimizer``. Missing
        tensors keep the device's value. Until then ``state_dict`` returns the loaded state.

        Args:
            state_dict: A dictionary from ``state_dict`` of the same class of optimizer.

        Raises:
            RuntimeError: The dictionary is empty, or from a torch optimizer.
            ValueError: The groups are not those of this optimizer.
            Error: ``ipu_state`` or ``ipu_param`` does not hold tensors by name, or a tensor does
                not have the shape of the device's.
        """
        if not state_dict:
            raise UsageRuntimeError(
                "Cannot load optimizer state dictionary because it is empty. Pass the result of "
                "state_dict() of a poptorch optimizer."
            )
        if not {"ipu_state", "ipu_param"} <= set(state_dict):
            raise UsageRuntimeError(
                "Only IPU optimizer states can be loaded onto the IPU: the keys 'ipu_state' and "
                "'ipu_param' are missing. Pass the result of state_dict() of a poptorch optimizer."
            )
        _check_tensors(state_dict)
        state, scalars = _copied(state_dict["ipu_state"]), _copied(state_dict["ipu_param"])
        tensors = {**(state or {}), **(scalars or {})}
        if self._device is not None:
            self._device.check_state(tensors)
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self._ipu_state, self._ipu_param = state, scalars
        self._pending = tensors or self._pending

    def __getstate__(self) -> dict[str, Any]:
        self._read_back()
        # torch copies only its own three entries, and makes its hooks again. A scheduler's wrapper
        # around step() belongs to this object, so it is not copied.
        own = {
            name: value
            for name, value in vars(self).items()
            if name not in ("_device", "_version", "step") and not name.startswith("_optimizer_")
        }
        own["variable_attrs"] = copy.deepcopy(self.variable_attrs)
        if self._device is not None and self._pending is None:
            own["_pending"] = self._ipu_state or None
        return {**own, **super().__getstate__()}


def _check_tensors(state_dict: Mapping[str, Any]) -> None:
    """Check that the entries of the device hold tensors by name, or are None."""
    for key in ("ipu_state", "ipu_param"):
        tensors = state_dict[key]
        if tensors is None:
            continue
        given = {key: tensors} if not isinstance(tensors, Mapping) else tensors
        for name, value in given.items():
            if not isinstance(value, torch.Tensor):
                raise Error(
                    f"load_state_dict: '{key}' has to hold tensors by name, got a "
                    f"{type(value).__name__} for {name!r}. Pass the result of state_dict() of a "
                    "poptorch optimizer."
                )


def _copied(tensors: Mapping[str, torch.Tensor] | None) -> Tensors | None:
    return None if tensors is None else {name: t.clone() for name, t in tensors.items()}
