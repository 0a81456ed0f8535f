"""Custom operators in a trace: ``popsim::custom``, and its gradient."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from popsim_torch.custom_ops.registry import (
    CustomCall,
    Type,
    check_examples,
    has_gradient,
    result_types,
)
from popsim_torch.dtypes import dtype_name, returned_dtype
from popsim_torch.errors import Error
from popsim_torch.trace.graph.device import DEVICE
from popsim_torch.trace.graph.markers import NAMESPACE
from popsim_torch.trace.graph.origin import user_line
from popsim_torch.typed_torch import apply, new_library

__all__ = ["CUSTOM", "custom_results"]

_FORWARD = -1  # `gradient_of` of the operator itself; in its gradient, the number of its inputs

# Attributes and results are JSON: schemas support no dicts and no lists of lists.
_SCHEMA = (
    "custom(Tensor[] inputs, str domain, str name, int version, str attributes, str results, "
    "int gradient_of) -> Tensor[]"
)


def _empty_results(
    _inputs: list[torch.Tensor],
    _domain: str,
    _name: str,
    _version: int,
    _attributes: str,
    results: str,
    _gradient_of: int,
) -> list[torch.Tensor]:
    return [
        torch.empty(shape, dtype=getattr(torch, dtype), device=DEVICE)
        for dtype, shape in json.loads(results)
    ]


def _register() -> Any:
    library = new_library(NAMESPACE, "FRAGMENT")
    library.define(_SCHEMA)
    torch.library.register_fake(f"{NAMESPACE}::custom", _empty_results, lib=library)
    return library


_library = _register()  # the operator exists as long as this object

CUSTOM = torch.ops.popsim.custom.default


def _compute(
    call: CustomCall, inputs: Sequence[torch.Tensor], results: Sequence[Type], gradient_of: int
) -> tuple[torch.Tensor, ...]:
    types = json.dumps([(dtype_name(dtype), shape) for dtype, shape in results])
    attributes = json.dumps(call.attributes)
    return tuple(
        CUSTOM(list(inputs), call.domain, call.name, call.version, attributes, types, gradient_of)
    )


def _types(tensors: Iterable[torch.Tensor]) -> list[Type]:
    """Return shape and dtype of tensors on the device."""
    return [(returned_dtype(tensor.dtype), tuple(tensor.shape)) for tensor in tensors]


class _Gradient(torch.autograd.Function):
    """Computes the gradient of an operator."""

    @staticmethod
    def forward(call: CustomCall, num_inputs: int, *tensors: torch.Tensor) -> Any:
        """Return the gradients of the floating-point inputs."""
        types = _types(tensor for tensor in tensors[:num_inputs] if tensor.is_floating_point())
        return _compute(call, tensors, types, num_inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep the call."""
        ctx.call = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        """Refuse a second differentiation."""
        raise Error(f"The gradient of a gradient is not supported for custom_op: {ctx.call.shown}.")


class _Operator(torch.autograd.Function):
    """A custom operator: ``apply(call, *inputs)`` returns a tuple of its outputs."""

    @staticmethod
    def forward(call: CustomCall, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs."""
        return _compute(call, inputs, call.results, _FORWARD)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep the tensors that the gradient reads."""
        ctx.call, *given = inputs
        ctx.place = user_line(" at ")
        ctx.num_inputs = len(given)
        ctx.mark_non_differentiable(*(o for o in output if not o.is_floating_point()))
        if has_gradient(ctx.call):
            ctx.save_for_backward(*given, *output)

    @staticmethod
    def vmap(_info: Any, _in_dims: Any, call: CustomCall, *_: Any) -> Any:
        """Refuse ``torch.vmap``."""
        raise Error(
            f"custom_op{user_line(' at ')}: {call.shown} is called under torch.vmap, but its "
            "kernel does not support a further axis. Call it on the whole batch."
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Return the gradient of each input."""
        if not has_gradient(ctx.call):
            raise Error(
                f"custom_op{ctx.place}: {ctx.call.shown} has no gradient, but the loss depends on "
                "parameters through it. Register a gradient with the operator, or detach() its "
                "inputs."
            )
        saved = ctx.saved_tensors
        outputs = saved[ctx.num_inputs :]
        arriving = [
            gradient
            for gradient, output in zip(gradients, outputs, strict=True)
            if output.is_floating_point()
        ]
        found = iter(apply(_Gradient, ctx.call, ctx.num_inputs, *saved, *arriving))
        inputs = saved[: ctx.num_inputs]
        return (None, *(next(found) if one.is_floating_point() else None for one in inputs))


def custom_results(call: CustomCall, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the results of a custom operator, traced.

    Args:
        call: The call of the operator.
        inputs: The traced inputs.

    Raises:
        Error: The operator's shape rule refuses them, or its results differ from the examples.
    """
    try:
        found = result_types(call, _types(inputs))
        if found is not None:
            check_examples(call, found)
    except Error as error:
        raise Error(f"custom_op{user_line(' at ')}: {error.message}") from error
    return list(apply(_Operator, call, *inputs))
