"""Converts the result of ``forward`` to a flat list of tensors, and back.

An ``OutputSpec`` is made from the result of the call that compiles a model. Any value that is not a
tensor or a container of tensors is a constant, fixed when the model is compiled.
"""

from __future__ import annotations

import dataclasses
import operator
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set, ValuesView
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from popsim_torch.arguments.structures import (
    ConstantNode,
    DataclassNode,
    Node,
    TensorNode,
    describe,
    walk,
)
from popsim_torch.errors import Error
from popsim_torch.private_torch.trees import tree_iter

__all__ = ["OutputSpec", "tensors_inside"]


class OutputSpec:
    """The result of ``forward`` when the model was compiled.

    Args:
        value: The result, of any structure.
        on_device: Returns whether the device computes a tensor. Other tensors, and all other
            values, are returned unchanged.

    Attributes:
        names: Name of each tensor that the device computes, such as ``output[0]``.

    Raises:
        Error: An object of a type without parser holds tensors of the device, or is an iterator.
    """

    def __init__(
        self, value: Any, on_device: Callable[[torch.Tensor], bool] = lambda tensor: True
    ) -> None:
        def leaf(name: str, value: Any) -> Node:
            if isinstance(value, torch.Tensor):
                if on_device(value):
                    return TensorNode(name, value)
                warnings.warn(
                    f"Output expected to be on the IPU, but {name} is on {value.device}: every "
                    "call returns the value it has now.",
                    stacklevel=2,
                )
            elif dataclasses.is_dataclass(value) and not isinstance(value, type):
                return DataclassNode(name, value, leaf)
            elif isinstance(value, Iterator) and not hasattr(value, "__dict__"):
                raise Error(
                    f"forward returns a {type(value).__name__}: {name}. It can be read only once, "
                    "and forward runs once, when the model is compiled. Return its items in a "
                    "tuple or list."
                )
            elif any(map(on_device, tensors_inside(value))):
                raise Error(
                    f"forward returns tensors of the device in an object of type "
                    f"{type(value).__name__}: {name}. Return them in a tuple, list, dict, "
                    "namedtuple or dataclass, or register a parser for the type: "
                    "poptorch.registerCustomArgParser."
                )
            return ConstantNode(name, value, snapshot=False)

        self._node = describe("output", value, leaf)
        # The common kinds of results are built without a walk through the structure.
        self._simple: Callable[[Sequence[torch.Tensor]], Any] | None = None
        if isinstance(self._node, TensorNode):
            self._simple = operator.itemgetter(0)
        elif self._node.kind is tuple and all(
            isinstance(child, TensorNode) for child in self._node.children
        ):
            self._simple = tuple
        self.names = tuple(n.name for n in walk([self._node]) if isinstance(n, TensorNode))

    def flatten(self, value: Any) -> list[torch.Tensor]:
        """Return the tensors in a result that the device computes.

        Args:
            value: A result of the same structure, usually the first one.
        """
        tensors: list[torch.Tensor] = []
        self._node.collect(value, tensors)
        return tensors

    def unflatten(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return a result with other tensors.

        Args:
            tensors: As many tensors as ``names``, in that order, of any shape.
        """
        return self._node.build(iter(tensors)) if self._simple is None else self._simple(tensors)


def tensors_inside(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that an object holds in its attributes, as its items or as a function.

    Args:
        value: An object of any type.
    """
    if isinstance(value, nn.Module):
        return  # (its tensors are parameters and buffers)
    inside = list(getattr(value, "__dict__", {}).values())
    if isinstance(value, (Set, ValuesView, deque)):
        inside += value
    elif isinstance(value, Mapping):
        inside += value.values()
    elif isinstance(value, partial):
        inside += (value.args, value.keywords)
    elif isinstance(value, FunctionType):
        inside += [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
    for leaf in tree_iter(inside):
        if isinstance(leaf, torch.Tensor):
            yield leaf
