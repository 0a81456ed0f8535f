"""A lowering rule, and helpers that many rules need."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from popsim_torch.lowering.emit.builder import Builder, Place, Value
from popsim_torch.private_torch.operators import OpOverload

HALF_AND_FLOAT = frozenset({torch.float16, torch.float32})
FLOATING = HALF_AND_FLOAT | {torch.bfloat16}


def _always(_node: torch.fx.Node) -> bool:
    return True


@dataclass(frozen=True)
class Rule:
    """Lowers the nodes of an operator to ops.

    Attributes:
        lower: Adds the ops and returns the result of the node.
        supports: Returns whether it supports a node; other nodes run through PyTorch's kernels.
    """

    lower: Callable[[Builder, torch.fx.Node, Place], Value]
    supports: Callable[[torch.fx.Node], bool] = _always


@dataclass(frozen=True)
class Family:
    """One rule for all operators with a property, also those of third parties.

    Attributes:
        claims: Returns whether an operator has the property.
        rule: The rule that lowers its nodes.
    """

    claims: Callable[[OpOverload], bool]
    rule: Rule


def operands(node: torch.fx.Node) -> list[torch.Tensor]:
    """Return the traced tensors that a node reads, with their shapes and dtypes."""
    values: list[Any] = [source.meta["val"] for source in node.all_input_nodes]
    return values


def all_filled(tensors: Iterable[torch.Tensor], dtypes: frozenset[torch.dtype]) -> bool:
    """Return whether all tensors have one of these dtypes and none is empty."""
    return all(tensor.dtype in dtypes and tensor.numel() > 0 for tensor in tensors)
