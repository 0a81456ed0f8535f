"""Operators that only exist while tracing and while lowering: names, constants and prints.

``mark(x, key)`` is x; its node tells where the gradient that belongs to ``key`` is complete.
``constant(size, dtype, index)`` stands for captured data. ``print_tensor(x, key)`` is x, printed.
"""

from __future__ import annotations

import torch

NAMESPACE = "popsim"

_library = torch.library.Library(NAMESPACE, "DEF")
_library.define("mark(Tensor x, int key) -> Tensor")
_library.define("constant(int[] size, ScalarType dtype, int index, Device device) -> Tensor")
_library.define("print_tensor(Tensor x, int key) -> Tensor")


def _same_layout(x: torch.Tensor, key: int) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


@torch.library.register_fake(f"{NAMESPACE}::mark", lib=_library)
def _mark(x: torch.Tensor, key: int) -> torch.Tensor:
    return _same_layout(x, key)


@torch.library.register_fake(f"{NAMESPACE}::print_tensor", lib=_library)
def _print_tensor(x: torch.Tensor, key: int) -> torch.Tensor:
    return _same_layout(x, key)


@torch.library.register_fake(f"{NAMESPACE}::constant", lib=_library)
def _constant(
    size: list[int], dtype: torch.dtype, index: int, device: torch.device
) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=device)


MARK = torch.ops.popsim.mark.default
CONSTANT = torch.ops.popsim.constant.default
PRINT = torch.ops.popsim.print_tensor.default


class PrintedTensor(torch.autograd.Function):
    """Identity that prints its input and, when asked to, the gradient that comes back."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, key: int, gradient_key: int | None) -> torch.Tensor:  # type: ignore[no-untyped-def]
        """Print ``x``; ``gradient_key`` None leaves the gradient alone."""
        ctx.gradient_key = gradient_key
        result: torch.Tensor = torch.ops.popsim.print_tensor(x, key)
        return result

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):  # type: ignore[no-untyped-def, override]
        """Print the gradient and hand it on."""
        if ctx.gradient_key is not None:
            gradient = torch.ops.popsim.print_tensor(gradient, ctx.gradient_key)
        return gradient, None, None
