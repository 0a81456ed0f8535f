"""What one lowering rule is, and the questions that many rules ask of a node."""

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
    """How the nodes of an operator become ops.

    Attributes:
        lower: Adds the ops and returns what the node became.
        supports: Whether it can; nodes that it cannot lower run through PyTorch's kernels.
    """

    lower: Callable[[Builder, torch.fx.Node, Place], Value]
    supports: Callable[[torch.fx.Node], bool] = _always


@dataclass(frozen=True)
class Family:
    """One rule for all operators with a property, third parties' included.

    Attributes:
        claims: Whether an operator has the property.
        rule: What lowers its nodes.
    """

    claims: Callable[[OpOverload], bool]
    rule: Rule


def operands(node: torch.fx.Node) -> list[torch.Tensor]:
    """Return the traced tensors that a node reads: their shapes and element types."""
    values: list[Any] = [source.meta["val"] for source in node.all_input_nodes]
    return values


def all_filled(tensors: Iterable[torch.Tensor], dtypes: frozenset[torch.dtype]) -> bool:
    """Whether all tensors are of these element types and none is empty."""
    return all(tensor.dtype in dtypes and tensor.numel() > 0 for tensor in tensors)
