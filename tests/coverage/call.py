"""One call of an operator or module, whose tensors can be replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


def itself(value: Any) -> Any:
    """Return the argument."""
    return value


@dataclass
class Call:
    """A call.

    Attributes:
        function: What is called.
        structure: The arguments, ``(args, kwargs)``.
        keep: Selects of a result what is differentiated: some results have no unique value.
        module: The module whose parameters are trained; None for an operator.
        unwritten: Whether results have no values, as those of ``torch.empty``.
    """

    function: Callable[..., Any]
    structure: tuple[tuple[Any, ...], dict[str, Any]]
    keep: Callable[[Any], Any] = itself
    module: nn.Module | None = None
    unwritten: bool = False
    leaves: list[Any] = field(init=False)
    spec: Any = field(init=False)
    positions: list[int] = field(init=False)

    def __post_init__(self) -> None:
        args, kwargs = self.structure
        # The device is where the other tensors are.
        kwargs = {name: v for name, v in kwargs.items() if name != "device"}
        self.leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.positions = [i for i, v in enumerate(self.leaves) if isinstance(v, torch.Tensor)]

    @property
    def given(self) -> list[torch.Tensor]:
        """The tensors of the call, as they are."""
        return [self.leaves[i] for i in self.positions]

    def tensors(self, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        """Return new tensors with the values of the call.

        Args:
            dtype: The dtype of floating-point numbers, and of the parts of complex numbers; None:
                as they are.
        """
        return [_copied(value, dtype) for value in self.given]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Call with other tensors."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        if tensors:
            here = tensors[0].device
            leaves = [here if _is_device(v) else v for v in leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)

    @property
    def out_of_scope(self) -> str:
        """Why the device has no such tensors; empty if it does."""
        return out_of_scope(self.given)

    @property
    def is_empty(self) -> bool:
        """Whether a tensor of the call has no values."""
        return any(value.numel() == 0 for value in self.given)


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value == "cpu")


def out_of_scope(tensors: Sequence[torch.Tensor]) -> str:
    """Return why the device has no such tensors; empty if it does."""
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            return "sparse"
        if tensor.dtype == torch.complex32:
            return "half complex"
    return ""


def _copied(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a leaf with the values, strides and ``requires_grad`` of a tensor."""
    value = tensor.detach()
    if dtype is not None and is_inexact(value):
        copy = value.to(dtype.to_complex() if value.is_complex() else dtype, copy=True)
    elif 0 in value.stride():
        copy = value.clone()
    else:
        copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        copy.copy_(value)
    return copy.requires_grad_(tensor.requires_grad)


def is_inexact(tensor: torch.Tensor) -> bool:
    """Return whether the values are floating-point or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def parts(tensor: torch.Tensor) -> torch.Tensor:
    """Return the real and imaginary parts of complex values; other values as they are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def tensor_leaves(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a result."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def weighted(result: Any) -> Any:
    """Return a sum of all inexact results, each value and each part with a weight of its own."""
    total: Any = 0.0
    for leaf in map(parts, tensor_leaves(result)):
        if leaf.is_floating_point() and leaf.requires_grad:
            numbers = torch.arange(1, leaf.numel() + 1, dtype=torch.float32, device=leaf.device)
            weights = (numbers * 0.7548).frac() + 0.5
            total = total + (leaf * weights.reshape(leaf.shape).to(leaf.dtype)).sum()
    return total
