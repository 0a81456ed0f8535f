"""A product of matrices in slices, as an own operator: ``popsim::serialized_matmul``.

Its gradients are two more such products: they are computed in the same slices as the product.
"""

from __future__ import annotations

from typing import Any

import torch

from popsim_torch.trace.graph.markers import NAMESPACE
from popsim_torch.typed_torch import new_library

_SCHEMA = (
    "serialized_matmul(Tensor a, Tensor b, str slices, int factor, bool wide_sums, "
    "ScalarType dtype) -> Tensor"
)
# The sliced dimension in the gradients of a and of b: rows of a are rows of its gradient, but in
# the gradient of b they are the summed dimension.
_OF_GRADIENTS = {
    "rows": ("rows", "depth"),
    "columns": ("depth", "columns"),
    "depth": ("columns", "rows"),
}


def _product(
    a: torch.Tensor, b: torch.Tensor, _slices: str, _factor: int, _wide: bool, dtype: torch.dtype
) -> torch.Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=dtype)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, ctx.slices, *ctx.settings, _dtype = inputs
    ctx.save_for_backward(a, b)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    a, b = ctx.saved_tensors
    multiply = torch.ops.popsim.serialized_matmul
    slices = _OF_GRADIENTS[ctx.slices]
    of_a = of_b = None
    if ctx.needs_input_grad[0]:
        of_a = multiply(gradient, b.transpose(-2, -1), slices[0], *ctx.settings, a.dtype)
    if ctx.needs_input_grad[1]:
        of_b = multiply(a.transpose(-2, -1), gradient, slices[1], *ctx.settings, b.dtype)
    return of_a, of_b, None, None, None, None


def _register() -> Any:
    library = new_library(NAMESPACE, "FRAGMENT")
    name = f"{NAMESPACE}::serialized_matmul"
    library.define(_SCHEMA)
    torch.library.register_fake(name, _product, lib=library)
    torch.library.register_autograd(name, _backward, setup_context=_keep_for_backward, lib=library)
    return library


_library = _register()  # the operator exists as long as this object

SERIALIZED_MATMUL = torch.ops.popsim.serialized_matmul.default
