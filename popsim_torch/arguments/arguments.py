"""Converts the user's arguments to flat lists of tensors, and back.

An ``ArgumentSpec`` is made from the call that compiles a model. It stores the whole structure of
the arguments, converts later calls to the same list of tensors, and refuses a call that differs,
because a compiled program cannot change. Any value that is not a tensor or a container of tensors
is a constant, fixed when the model is compiled.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from popsim_torch import _native
from popsim_torch.arguments.integers import warn_of_wide_integers
from popsim_torch.arguments.structures import (
    ConstantNode,
    MappingNode,
    Node,
    TensorNode,
    describe,
    walk,
)
from popsim_torch.dtypes import INPUTS, dtype_name
from popsim_torch.errors import Error, UsageAssertionError
from popsim_torch.wrapper_tensors import is_wrapper

__all__ = [
    "ArgumentSpec",
    "micro_batch_shape",
]

_logger = logging.getLogger("poptorch::python")

_NO_KEYWORDS: Mapping[str, Any] = {}


def micro_batch_shape(
    shape: Sequence[int], factor: int, *, argument: str, D: int, GA: int, R: int, g: int
) -> tuple[int, ...]:
    """Return the shape that ``forward`` sees of one input tensor.

    Args:
        shape: Shape of the whole tensor that the user passes; ``()`` counts as one sample.
        factor: ``F = D * GA * (R // g)``, micro-batches per call.
        argument: The argument's name, for the error.
        D: Device iterations.
        GA: Gradient accumulation.
        R: Replicas.
        g: Replicas that share one input.

    Raises:
        UsageAssertionError: The first size is not a multiple of ``factor``.
    """
    num_samples = shape[0] if len(shape) else 1
    if num_samples % factor:
        raise UsageAssertionError(
            f"Input {argument} of shape {tuple(shape)}: the size of its first dimension, "
            f"{num_samples}, is not a multiple of the combined factor F={factor}, which is "
            f"deviceIterations (D={D}) x gradientAccumulation (GA={GA}) x replicationFactor (R={R})"
            f" / replicas that share an input (g={g}). Pass whole micro-batches, for example with "
            "poptorch.DataLoader."
        )
    return (num_samples // factor, *shape[1:]) if len(shape) else ()


class ArgumentSpec:
    """The arguments of the call that compiled a model; later calls must have the same structure.

    Tensors are flattened depth first, in the order of the signature; dicts in the order of their
    keys in this call. Tensors that are default values in the signature count as inputs.

    Args:
        signature: Signature of ``forward``, without ``self``.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
        warned: The warnings that were already given. All specs of an executor share it, so each
            warning is given once.
        needs_values: Whether tensors on the device ``meta``, which have no values, are refused.

    Attributes:
        names: Name of each tensor, such as ``x[0][a]``.
        dtypes: Dtype of each tensor that the user passed.
        shapes: Shape of each whole tensor; see :func:`micro_batch_shape`.
        kinds: Class of each tensor.
        signature: As given.

    Raises:
        UsageAssertionError: Too many arguments, an unknown keyword, or a parameter given twice.
        Error: A required argument is missing, or the device does not support the kind of a tensor.
    """

    def __init__(
        self,
        signature: inspect.Signature,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] = _NO_KEYWORDS,
        *,
        warned: set[str] | None = None,
        needs_values: bool = True,
    ) -> None:
        self._warned = set() if warned is None else warned
        self.signature = signature
        self._parameters = tuple(signature.parameters.values())
        values = self._bind(args, kwargs)
        self._nodes = [
            describe(_label(parameter), value, partial(_input_leaf, needs_values))
            for parameter, value in zip(self._parameters, values, strict=True)
        ]
        self._warn_of_dicts()
        leaves = [node for node in walk(self._nodes) if isinstance(node, TensorNode)]
        self.names = tuple(leaf.name for leaf in leaves)
        self.dtypes = tuple(leaf.dtype for leaf in leaves)
        self.shapes = tuple(tuple(leaf.shape) for leaf in leaves)
        self.kinds = tuple(leaf.kind for leaf in leaves)
        # The common case: a model takes only tensors, and a call passes them by position.
        self._plain: _native.PlainArguments | None = None
        if (
            leaves == self._nodes
            and all(leaf.kind is torch.Tensor for leaf in leaves)
            and all(p.kind is not p.KEYWORD_ONLY for p in self._parameters)
        ):
            self._plain = _native.PlainArguments([(leaf.dtype, leaf.shape) for leaf in leaves])

    def flatten(
        self, args: Sequence[Any], kwargs: Mapping[str, Any] = _NO_KEYWORDS
    ) -> list[torch.Tensor]:
        """Return the tensors of a call, ready for the device.

        They are detached and contiguous, and have the caller's dtypes. A contiguous tensor shares
        its memory with the caller's tensor; others are copied.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.

        Raises:
            UsageAssertionError: As for the class.
            Error: The call has another structure than the one that compiled the model.
        """
        plain = self._plain
        if plain is not None and not kwargs and plain.fit(tuple(args)):
            return list(args)
        return self._flatten_any(args, kwargs)

    def given(
        self, args: Sequence[Any], kwargs: Mapping[str, Any] = _NO_KEYWORDS
    ) -> list[torch.Tensor]:
        """Return the tensors of a call in the caller's memory, also those that are not contiguous.

        Args:
            args: Positional arguments of a call that :meth:`flatten` has accepted.
            kwargs: Its keyword arguments.
        """
        plain = self._plain
        if plain is not None and not kwargs and plain.fit(tuple(args)):
            return list(args)
        return [one.detach().as_subclass(torch.Tensor) for one in self._collect(args, kwargs)]

    def unflatten(self, tensors: Iterable[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments for ``forward`` like those of the first call, with other tensors.

        Args:
            tensors: As many tensors as ``names``, in that order, of any shape and dtype.

        Returns:
            The positional and the keyword arguments. The keyword arguments are only keyword-only
            parameters and extra keywords.
        """
        source = iter(tensors)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for parameter, node in zip(self._parameters, self._nodes, strict=True):
            value = node.build(source)
            if parameter.kind is parameter.VAR_POSITIONAL:
                args.extend(value)
            elif parameter.kind is parameter.VAR_KEYWORD:
                kwargs.update(value)
            elif parameter.kind is parameter.KEYWORD_ONLY:
                kwargs[parameter.name] = value
            else:
                args.append(value)
        return tuple(args), kwargs

    def _collect(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        values = self._bind(args, kwargs)
        self._check_number(values)
        for node, value in zip(self._nodes, values, strict=True):
            node.collect(value, tensors)
        return tensors

    def _flatten_any(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        tensors = self._collect(args, kwargs)
        for i, tensor in enumerate(tensors):
            if type(tensor) is not torch.Tensor or not _is_ready(tensor):
                tensors[i] = self._prepare(self.names[i], tensor)
        return tensors

    def _check_number(self, values: Sequence[Any]) -> None:
        """Refuse a call with another number of positional arguments, unless there is ``*args``."""
        for parameter, node, value in zip(self._parameters, self._nodes, values, strict=True):
            if parameter.kind is parameter.VAR_POSITIONAL and len(value) != len(node.children):
                named = sum(
                    p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in self._parameters
                )
                raise Error(
                    "Number of positional arguments mismatch: expected "
                    f"{named + len(node.children)} arguments but got {named + len(value)} "
                    "arguments. A compiled model is never compiled again by itself: call destroy() "
                    "on it, or make a new wrapper for such calls."
                )

    def _prepare(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        _check_input(name, tensor)
        warn_of_wide_integers(f"Input {name}", tensor)
        if tensor.requires_grad:
            self._warn(
                "requires_grad",
                f"Input {name} has requires_grad=True set: it will be detached, and no gradient "
                "reaches it.",
            )
        tensor = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
        if not tensor.is_contiguous():
            self._warn(
                "non-contiguous",
                f"Input {name} is not contiguous in memory: it is copied, here and at every such "
                "call. Passing input.contiguous() makes the copy visible.",
            )
            tensor = tensor.contiguous()
        return tensor

    def _warn_of_dicts(self) -> None:
        for parameter, root in zip(self._parameters, self._nodes, strict=True):
            # Skip the dict of extra keywords, which this class makes.
            roots = root.children if parameter.kind is parameter.VAR_KEYWORD else [root]
            for node in walk(roots):
                if isinstance(node, MappingNode):
                    self._warn(
                        "dict",
                        f"Input {node.name} is a dict: its tensors are passed in the order its "
                        "keys have now, whatever their order in later calls.",
                    )

    def _warn(self, topic: str, text: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            _logger.warning(text)

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return one value per parameter of the signature."""
        values: list[Any] = []
        left = dict(kwargs)
        num_used = 0
        for parameter in self._parameters:
            name, kind = parameter.name, parameter.kind
            by_name = name in left and kind is not parameter.POSITIONAL_ONLY
            if kind is parameter.VAR_POSITIONAL:
                values.append(tuple(args[num_used:]))
                num_used = len(args)
            elif kind is parameter.VAR_KEYWORD:
                values.append(left)
                left = {}
            elif kind is not parameter.KEYWORD_ONLY and num_used < len(args):
                if by_name:
                    raise UsageAssertionError(
                        f"Argument {name} was given twice: by position and by keyword."
                    )
                values.append(args[num_used])
                num_used += 1
            elif by_name:
                values.append(left.pop(name))
            elif parameter.default is not parameter.empty:
                values.append(parameter.default)
            else:
                raise Error(
                    f"Mandatory parameter {name} missing: forward takes {self._signature()}."
                )
        if num_used < len(args):
            raise UsageAssertionError(
                f"Too many arguments: got {len(args)} by position, but forward takes "
                f"{self._signature()}."
            )
        if left:
            raise UsageAssertionError(
                f"Unknown keyword {', '.join(left)}: forward takes {self._signature()}."
            )
        return values

    def _signature(self) -> str:
        shown = [parameter.replace(annotation=parameter.empty) for parameter in self._parameters]
        return str(inspect.Signature(shown))


def _label(parameter: inspect.Parameter) -> str:
    """Return a parameter's name as in the signature."""
    if parameter.kind is parameter.VAR_POSITIONAL:
        return f"*{parameter.name}"
    return f"**{parameter.name}" if parameter.kind is parameter.VAR_KEYWORD else parameter.name


def _input_leaf(needs_values: bool, name: str, value: Any) -> Node:
    if isinstance(value, torch.Tensor):
        _check_input(name, value, needs_values=needs_values)
        return TensorNode(name, value)
    return ConstantNode(name, value, snapshot=True)


def _is_ready(tensor: torch.Tensor) -> bool:
    """Return whether the device can read a tensor without conversion or copy."""
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and not tensor.is_nested
        and not tensor.requires_grad
        and not tensor.is_neg()
        and not tensor.is_conj()
        and tensor.is_contiguous()
        and _native.fits_32_bits(tensor)
    )


def _check_input(name: str, tensor: torch.Tensor, *, needs_values: bool = True) -> None:
    """Raise an error for a tensor that the device does not support."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "a nested" if tensor.is_nested else f"a sparse ({tensor.layout})"
        raise Error(f"Input {name} is {kind} tensor. Only dense tensors are supported.")
    if is_wrapper(tensor):
        raise Error(
            f"Input {name} is a {type(tensor).__name__}, which consists of other tensors. Pass "
            "those tensors instead."
        )
    if tensor.is_quantized or tensor.dtype not in INPUTS:
        names = ", ".join(map(dtype_name, INPUTS))
        raise Error(f"Input {name} has dtype {tensor.dtype}. Supported are: {names}.")
    if tensor.device.type == "ipu":
        raise Error(
            f"Input {name} is a tensor of the program that is being traced: the model is called in "
            "the body of a loop, or in the forward of another model. Call the module itself "
            "there, not the result of trainingModel or inferenceModel."
        )
    if not tensor.is_cpu and (needs_values or not tensor.is_meta):
        raise Error(f"Input {name} is on device {tensor.device}. Pass it on the CPU: input.cpu().")
    if 0 in tensor.shape:
        raise Error(
            f"Zero-sized tensors are unsupported: input {name}. Got shape {list(tensor.shape)}. "
            "Skip the call if there is no data."
        )
