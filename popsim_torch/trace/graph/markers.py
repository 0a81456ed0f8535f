"""Operators that exist only during the trace and lowering.

``mark(x, key)`` is x; its node says where the gradient of ``key`` is complete.
``constant(size, dtype, index)`` is captured data. ``print_tensor(x, key)`` is x, printed.
``repeat_while(condition)`` ends a device loop after the iteration in which the condition is false.
"""

from __future__ import annotations

from typing import Any

import torch

from popsim_torch.private_torch.fake import FakeTensor
from popsim_torch.private_torch.proxies import (
    add_call,
    constant_or_node,
    current_tracer,
    track,
)
from popsim_torch.trace.graph.origin import copy_channel
from popsim_torch.trace.graph.traced_tensors import TraceMode, is_plain, layout_of
from popsim_torch.typed_torch import new_library

NAMESPACE = "popsim"

_SCHEMAS = (
    "mark(Tensor x, int key) -> Tensor",
    "constant(int[] size, ScalarType dtype, int index, Device device) -> Tensor",
    "print_tensor(Tensor x, int key) -> Tensor",
    "repeat_while(Tensor condition) -> ()",
)


def _same_layout(x: torch.Tensor, key: int) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _constant(
    size: list[int], dtype: torch.dtype, index: int, device: torch.device
) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=device)


def _register() -> Any:
    library = new_library(NAMESPACE, "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    rules: dict[str, Any] = {
        "mark": _same_layout,
        "print_tensor": _same_layout,
        "constant": _constant,
        "repeat_while": lambda condition: None,
    }
    for name, rule in rules.items():
        torch.library.register_fake(f"{NAMESPACE}::{name}", rule, lib=library)
    for name in ("mark", "print_tensor"):
        # They are identities, also if a gradient is differentiated again.
        torch.library.register_autograd(
            f"{NAMESPACE}::{name}", lambda _, gradient: (gradient, None), lib=library
        )
    return library


_library = _register()  # the operators exist as long as this object

MARK = torch.ops.popsim.mark.default
CONSTANT = torch.ops.popsim.constant.default
PRINT = torch.ops.popsim.print_tensor.default
REPEAT_WHILE = torch.ops.popsim.repeat_while.default
torch.fx.node.has_side_effect(REPEAT_WHILE)


def mark(gradient: torch.Tensor, key: int) -> torch.Tensor:
    """Return ``gradient`` as the result of a new node, which is the mark of ``key``.

    There is one mark per gradient. If nothing is differentiated later, the node is made directly:
    the dispatcher takes several times as long.
    """
    tracer = None if torch.is_grad_enabled() else current_tracer()
    if tracer is None or type(gradient) is not FakeTensor:
        return MARK(gradient, key)  # type: ignore[no-any-return]
    node, mode = constant_or_node(tracer, gradient), gradient.fake_mode
    if not (
        isinstance(node, torch.fx.Node) and isinstance(mode, TraceMode) and is_plain(gradient, mode)
    ):
        return MARK(gradient, key)  # type: ignore[no-any-return]
    result, seen = mode.view(gradient, layout_of(gradient), gradient.fake_device)
    made = add_call(tracer.graph, MARK, (node, key), {})
    made.meta |= copy_channel() | {"val": seen}
    track(tracer, result, made)
    return result


class PrintedTensor(torch.autograd.Function):
    """Identity that prints its input and, if requested, the gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, key: int, gradient_key: int | None) -> torch.Tensor:
        """Print ``x``; with ``gradient_key`` None, do not print the gradient."""
        ctx.gradient_key = gradient_key
        result: torch.Tensor = torch.ops.popsim.print_tensor(x, key)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Print the gradient and return it."""
        if ctx.gradient_key is not None:
            gradient = torch.ops.popsim.print_tensor(gradient, ctx.gradient_key)
        return gradient, None, None
