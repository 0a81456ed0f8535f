"""``custom_op``: calls an operator by its name and domain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from popsim_torch.custom_ops.attributes import checked
from popsim_torch.custom_ops.built_in import built_in, built_in_names
from popsim_torch.custom_ops.registry import (
    CustomCall,
    Type,
    check_examples,
    is_registered,
    refuse_unknown,
)
from popsim_torch.dtypes import returned_dtype
from popsim_torch.errors import Error, UsageTypeError, UsageValueError
from popsim_torch.ops import op_listener

__all__ = ["custom_op"]


def custom_op(
    inputs: list[torch.Tensor] | tuple[torch.Tensor, ...],
    name: str,
    domain: str,
    domain_version: int,
    example_outputs: list[torch.Tensor] | tuple[torch.Tensor, ...],
    attributes: dict[str, Any] | None = None,
) -> list[torch.Tensor]:
    """Call an operator that a library or :func:`register_custom_op` has registered.

    Outside of a traced model nothing is computed: the results are zeros. Some operators are built
    in: ``FastGatherLastDim`` of the domain ``poptorch.custom_ops``, and common operators of
    ``ai.onnx`` and ``ai.graphcore``. A registered operator overrides a built-in one with the same
    name.

    Args:
        inputs: The input tensors, with any shapes. Kernels get them contiguous, and int64 as int32.
        name: The name of the operator.
        domain: The domain of the operator.
        domain_version: The version of the operator.
        example_outputs: Tensors with the shapes and dtypes of the results; their values are
            ignored.
        attributes: Numbers, strings, and lists or tuples of these, with one type in each list.

    Returns:
        The results: tensors like ``example_outputs``.

    Raises:
        UsageTypeError: ``name`` or ``domain`` is not a string, or ``domain_version`` is not an int.
        UsageValueError: ``inputs`` or ``example_outputs`` is not a list of tensors, or an attribute
            has a wrong type.
        Error: The operator does not exist, or gets or gives complex numbers; its shape rule refuses
            the inputs, or returns other outputs than the examples; a float is out of the range of
            float32.
    """
    _check_names(name, domain, domain_version)
    _check_tensors("inputs", inputs)
    _check_tensors("example_outputs", example_outputs)
    if not example_outputs:
        raise UsageValueError("custom_op: example_outputs is empty: an operator has an output.")
    given = checked(attributes)
    listener = op_listener.get()
    if listener is None:
        return [
            torch.zeros(example.shape, dtype=example.dtype, device=example.device)
            for example in example_outputs
        ]
    examples = tuple(_type_of(example) for example in example_outputs)
    call = CustomCall(domain, name, domain_version, given, examples)
    if is_registered(call):
        _check_real("inputs", inputs)
        _check_real("example_outputs", example_outputs)
        return listener.custom_op(inputs, call)
    composite = built_in(call)
    if composite is None:
        raise refuse_unknown(call, built_in_names())
    results = composite(list(inputs))
    try:
        check_examples(call, [_type_of(result) for result in results])
    except Error as error:
        raise Error(f"custom_op: {error.message}") from None
    return results


def _type_of(tensor: torch.Tensor) -> Type:
    return returned_dtype(tensor.dtype), tuple(int(size) for size in tensor.shape)


def _check_names(name: object, domain: object, version: object) -> None:
    for what, value in (("name", name), ("domain", domain)):
        if not isinstance(value, str):
            raise UsageTypeError(f"custom_op: {what} must be a str, got {type(value).__name__}.")
        if not value.isascii() or "\0" in value:
            raise UsageValueError(f"custom_op: {what} must be ASCII text, got {value!r:.100}.")
    if not isinstance(version, int) or not 0 <= version < 2**31:
        raise UsageTypeError(
            f"custom_op: domain_version must be an int from 0 on, got {version!r:.100}."
        )


def _check_real(what: str, tensors: Sequence[torch.Tensor]) -> None:
    for position, tensor in enumerate(tensors):
        if tensor.is_complex():
            raise Error(
                f"custom_op: {what}[{position}] has the dtype {tensor.dtype}, which kernels cannot "
                "get. Pass its numbers as pairs, torch.view_as_real(z), and make complex numbers "
                "of the results with torch.view_as_complex."
            )


def _check_tensors(what: str, tensors: object) -> None:
    if not isinstance(tensors, (list, tuple)):
        raise UsageValueError(
            f"custom_op: {what} must be a list or tuple of tensors, got {type(tensors).__name__}."
        )
    for position, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise UsageValueError(
                f"custom_op: {what}[{position}] must be a tensor, got {type(tensor).__name__}."
            )
