"""Operators of this package that replace a whole function in a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from popsim_torch.errors import Error
from popsim_torch.trace.graph.markers import NAMESPACE
from popsim_torch.typed_torch import new_library

__all__ = ["define_with_gradient"]


def define_with_gradient(
    name: str,
    schemas: tuple[str, str],
    shapes: tuple[Callable[..., Any], Callable[..., Any]],
    backward: Callable[..., Any],
    keep_for_backward: Callable[..., None],
    no_second_gradient: str,
) -> Any:
    """Define ``popsim::<name>`` and ``popsim::<name>_grad``, which computes its gradient.

    Args:
        name: Name of the operator.
        schemas: The schemas of both operators.
        shapes: Functions that return empty results, for both operators.
        backward: See ``torch.library.register_autograd``; calls the operator of the gradient.
        keep_for_backward: The ``setup_context`` of the same function.
        no_second_gradient: The subject of the error about a gradient of the gradient.

    Returns:
        An object; the operators exist as long as it does.
    """

    def refuse(ctx: Any, *_: object) -> None:
        raise Error(f"The gradient of a gradient is not supported for {no_second_gradient}")

    library = new_library(NAMESPACE, "FRAGMENT")
    operators = (f"{NAMESPACE}::{name}", f"{NAMESPACE}::{name}_grad")
    for operator, schema, results in zip(operators, schemas, shapes, strict=True):
        library.define(schema)
        torch.library.register_fake(operator, results, lib=library)
    torch.library.register_autograd(
        operators[0], backward, setup_context=keep_for_backward, lib=library
    )
    torch.library.register_autograd(operators[1], refuse, lib=library)
    return library
