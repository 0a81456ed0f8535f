"""Changes the arguments of torch functions for calls on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from typing_extensions import override

from popsim_torch.errors import Error
from popsim_torch.private_torch.devices import device_constructors
from popsim_torch.private_torch.operators import canonicalize_dim
from popsim_torch.trace.graph.device import DEVICE
from popsim_torch.trace.graph.origin import user_line
from popsim_torch.trace.mixed_types import in_one_type
from popsim_torch.trace.recurrent import RECURRENT_FUNCTIONS

_logger = logging.getLogger("poptorch::python")

_DROPOUTS = frozenset(
    {
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "dropout_",
        "alpha_dropout",
        "alpha_dropout_",
        "feature_dropout",
        "feature_dropout_",
        "feature_alpha_dropout",
        "feature_alpha_dropout_",
    }
)
# Functions that draw random numbers; those that end in an underscore change a tensor in place.
_RANDOM = _DROPOUTS | frozenset(
    {
        *("bernoulli", "multinomial", "normal", "poisson", "binomial"),
        *("rand_like", "randn_like", "randint_like"),
        *("cauchy_", "exponential_", "geometric_", "log_normal_", "random_", "uniform_"),
        *("gumbel_softmax", "rrelu"),
    }
)
_SOFTMAXES = frozenset({"softmax", "log_softmax"})
_RECURRENT_TRAIN = 6  # index of the argument that turns on dropout between layers
# Index of the argument that asks for a sparse gradient: the device supports dense tensors only.
_SPARSE_ARGUMENT: dict[Callable[..., Any], int] = {torch.embedding: 4, torch.embedding_bag: 5}


def on_device(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which the device runs a call.

    Args:
        func: A function of torch.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        Error: Random numbers would come from a generator of the host.
    """
    name = getattr(func, "__name__", "")
    if kwargs.get("generator") is not None:
        raise Error(
            f"forward{user_line(' at ')} draws random numbers from a torch.Generator "
            f"({name}), which belongs to the host. Leave it out: the device draws other numbers in "
            'each run, and Options.randomSeed seeds it. Or add device="cpu" to draw on the host, '
            "once for all runs."
        )
    if name in _SOFTMAXES:
        _check_softmax_axis(args, kwargs)
    sparse = _SPARSE_ARGUMENT.get(func)
    if sparse is not None and len(args) > sparse:
        args = (*args[:sparse], False, *args[sparse + 1 :])
    return in_one_type(name, args, kwargs)


def draws_random_numbers(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a call draws random numbers for tensors, without a generator.

    Args:
        func: A function of torch.
        kwargs: Its keyword arguments.
    """
    name = getattr(func, "__name__", "")
    drawn = name in _RANDOM or name.removesuffix("_") in _RANDOM
    return drawn and kwargs.get("generator") is None


def with_device(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the keyword arguments with which a function makes a tensor on the device.

    Args:
        func: A function of torch.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    given = (*args, *kwargs.values())
    drawn = func is torch.normal and not any(isinstance(value, torch.Tensor) for value in given)
    if func not in device_constructors() and not drawn:
        return kwargs
    if kwargs.get("device") is None:
        warn_of_no_device(func.__name__)
    return {**kwargs, "device": DEVICE}


def warn_of_no_device(name: str) -> None:
    """Warn that a call without a device makes a tensor on the device.

    Args:
        name: Name of a function of torch.
    """
    _logger.warning("No device set in torch.%s(): forcing to IPU%s", name, user_line(" at "))


def copied(name: str, tensor: torch.Tensor) -> Any:
    """Return the value for Python's ``copy`` module: a copy, or how to make a shallow one.

    Args:
        name: ``__deepcopy__`` or ``__reduce_ex__``.
        tensor: The tensor to copy.
    """
    if name == "__deepcopy__":
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return _with_same_memory, (_Copied(tensor),)


class _Copied:
    """A tensor to copy. Code that saves tensors, which gets it too, has to save this object."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        line = user_line(" at ", excludes=("pickle.py",))
        raise Error(
            f"forward{line} saves a tensor of the device (torch.save, pickle), which "
            "has no values while the model is traced. Save what the model returns, or its weights, "
            "after the call; or save it in a function that runs on the host (poptorch.CPU)."
        )


def _with_same_memory(copied: _Copied) -> torch.Tensor:
    """Return a tensor with the memory of another one, without its history."""
    return copied.tensor.data.requires_grad_(copied.tensor.requires_grad)


def _check_softmax_axis(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse an axis that does not exist: the shape of the result does not depend on it."""
    tensor = args[0] if args else kwargs.get("input")
    axis = args[1] if len(args) > 1 else kwargs.get("dim")
    if isinstance(tensor, torch.Tensor) and isinstance(axis, int):
        canonicalize_dim(tensor.dim(), axis)


def without_dropout(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], torch.Tensor | None]:
    """Return the call's arguments with dropout off, or the tensor that the call returns as it is.

    Raises:
        ValueError: A dropout probability is out of range.
    """
    if name in _DROPOUTS:
        probability = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        if not 0 <= probability <= 1:
            raise ValueError(
                f"dropout probability has to be between 0 and 1, but got {probability}"
            )
        return args, kwargs, args[0] if args else kwargs["input"]
    if name == "scaled_dot_product_attention":
        # query, key, value, mask, dropout_p
        args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        if "dropout_p" in kwargs:
            kwargs = {**kwargs, "dropout_p": 0.0}
    if name in RECURRENT_FUNCTIONS and len(args) > _RECURRENT_TRAIN:
        position = _RECURRENT_TRAIN if isinstance(args[3], bool) else _RECURRENT_TRAIN + 1
        args = (*args[:position], False, *args[position + 1 :])
    return args, kwargs, None
