"""Descriptions of nested containers of tensors, to read and rebuild containers like them.

``describe`` makes a tree of nodes from a value: one node for each container, tensor and constant.
Each node can ``collect`` the tensors of a value, which must have the same structure as the first
one, and ``build`` a value like the first one with other tensors. The order of tensors is depth
first.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import torch
from typing_extensions import override

from popsim_torch.arguments.parsers import ICustomArgParser, find_parser
from popsim_torch.errors import Error

__all__ = [
    "ConstantNode",
    "CustomNode",
    "DataclassNode",
    "MappingNode",
    "Node",
    "SequenceNode",
    "TensorNode",
    "describe",
    "walk",
]


_MOST_SHOWN = 200  # characters
_DEEPEST = 200  # containers inside of each other


class Node(ABC):
    """One place in a structure.

    Args:
        name: The name of the place for the user, such as ``x[0][a]``.
        value: The value there when the model was compiled.

    Attributes:
        name: As given.
        kind: The exact type of the value.
        children: The nodes inside, in order.
    """

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.kind: type[Any] = type(value)
        self.children: list[Node] = []

    @abstractmethod
    def collect(self, value: Any, tensors: list[torch.Tensor]) -> None:
        """Append the tensors of another value.

        Args:
            value: The current value at this place.
            tensors: The list to append the tensors of ``value`` to.

        Raises:
            Error: ``value`` does not have the same structure as the first one.
        """

    @abstractmethod
    def build(self, tensors: Iterator[torch.Tensor]) -> Any:
        """Return a value like the first one.

        Args:
            tensors: Yields the tensors for the value.
        """

    def check_kind(self, value: Any) -> None:
        """Raise an error if the value does not have exactly the type of the first one."""
        if type(value) is not self.kind:
            raise self.mismatch("Type", self.kind, type(value))

    def mismatch(self, kind: str, expected: object, given: object, advice: str = "") -> Error:
        """Return the error for a value that differs from the first one.

        Args:
            kind: The property that differs.
            expected: The property for which the model was compiled.
            given: The current property.
            advice: As for ``changed``.
        """
        return self.changed(kind, f"expected {_show(expected)} but got {_show(given)}", advice)

    def changed(self, kind: str, difference: str, advice: str = "") -> Error:
        """Return the error for a value that differs from the first one.

        Args:
            kind: The property that differs.
            difference: The difference, as a part of a sentence.
            advice: What to do in this case, as a sentence, before the general advice.
        """
        return Error(
            f"{kind} mismatch for {self.name}: {difference}. {advice}{' ' if advice else ''}A "
            "compiled model is never compiled again by itself: call destroy() on it, after which "
            "the next call compiles again and takes as long as the first one, or make a new "
            "wrapper for this kind of input."
        )


class TensorNode(Node):
    """A tensor, which others of the same type, dtype and shape can replace."""

    def __init__(self, name: str, value: torch.Tensor) -> None:
        super().__init__(name, value)
        self.dtype = value.dtype
        self.shape = value.shape

    @override
    def collect(self, value: Any, tensors: list[torch.Tensor]) -> None:
        self.check_kind(value)
        if value.dtype is not self.dtype:
            raise self.mismatch("Data type", self.dtype, value.dtype)
        if value.is_nested:
            raise self.mismatch("Shape", self.shape, "that of a nested tensor")
        if value.shape != self.shape:
            raise self.mismatch("Shape", self.shape, value.shape, self._advice(value.shape))
        tensors.append(value)

    def _advice(self, shape: torch.Size) -> str:
        """Return advice if only the batch is smaller, as the last one of an epoch may be."""
        if not shape or shape[1:] != self.shape[1:] or shape[0] >= self.shape[0]:
            return ""
        return (
            f"This batch of {shape[0]} is smaller than the first one, of {self.shape[0]}. If it is "
            "the last one of a data loader, pass drop_last=True to the loader."
        )

    @override
    def build(self, tensors: Iterator[torch.Tensor]) -> Any:
        return next(tensors)


class ConstantNode(Node):
    """A value fixed at compilation.

    Args:
        name: See :class:`Node`.
        value: The value, of any type.
        snapshot: Whether to compare with a copy, to detect a change in place. Types that compare by
            identity, and values that cannot be copied, are compared with the value itself.
    """

    def __init__(self, name: str, value: Any, *, snapshot: bool) -> None:
        super().__init__(name, value)
        self.value = value
        self.expected = value
        compares: Any = self.kind.__eq__
        if snapshot and compares is not object.__eq__:
            try:
                self.expected = copy.deepcopy(value)
            except Exception:  # a user's class may raise anything
                self.expected = value

    @override
    def collect(self, value: Any, tensors: list[torch.Tensor]) -> None:
        self.check_kind(value)
        if not self._equals(value):
            raise self.mismatch("Value", self.expected, value)

    @override
    def build(self, tensors: Iterator[torch.Tensor]) -> Any:
        return self.value

    def _equals(self, value: Any) -> bool:
        expected = self.expected
        if value is expected:
            return True
        try:
            if isinstance(value, numpy.ndarray):
                numeric = value.dtype.kind in "fc"
                return bool(
                    value.dtype == expected.dtype
                    and numpy.array_equal(value, expected, equal_nan=numeric)
                )
            if isinstance(value, (float, complex, numpy.generic)) and value != value:
                return bool(expected != expected)  # NaN is equal to NaN here
            return bool(value == expected)
        except Exception:  # a user's class may raise anything, for example if it contains tensors
            return value is self.value


class SequenceNode(Node):
    """A list, tuple or namedtuple, or an object of a type derived from one."""

    def __init__(self, name: str, value: Any, leaf: Callable[[str, Any], Node]) -> None:
        super().__init__(name, value)
        self.children = [describe(f"{name}[{i}]", element, leaf) for i, element in enumerate(value)]
        # Keep the attributes of a derived type besides its items, but none of its tensors.
        self._template = copy.copy(value) if isinstance(value, list) else None
        if self._template is not None:
            self._template[:] = [None] * len(value)

    @override
    def collect(self, value: Any, tensors: list[torch.Tensor]) -> None:
        self.check_kind(value)
        if len(value) != len(self.children):
            raise self.mismatch("Length", len(self.children), len(value))
        for child, element in zip(self.children, value, strict=True):
            child.collect(element, tensors)

    @override
    def build(self, tensors: Iterator[torch.Tensor]) -> Any:
        elements = [child.build(tensors) for child in self.children]
        if self._template is not None:
            result = copy.copy(self._template)
            result[:] = elements
            return result
        make: Callable[[Iterable[Any]], Any] = getattr(self.kind, "_make", self.kind)
        return make(elements)


class MappingNode(Node):
    """A dict or an object of a derived type; keeps the first order of its keys."""

    def __init__(self, name: str, value: Any, leaf: Callable[[str, Any], Node]) -> None:
        super().__init__(name, value)
        self.keys = list(value)
        self.children = [describe(f"{name}[{key}]", value[key], leaf) for key in self.keys]
        # Keep the attributes of a derived type besides its items, but none of its tensors.
        self._template = copy.copy(value)
        for key in self.keys:
            self._template[key] = None

    @override
    def collect(self, value: Any, tensors: list[torch.Tensor]) -> None:
        self.check_kind(value)
        if len(value) != len(self.keys) or any(key not in value for key in self.keys):
            raise self._changed_keys(value)
        for key, child in zip(self.keys, self.children, strict=True):
            child.collect(value[key], tensors)

    def _changed_keys(self, value: Any) -> Error:
        differences = (
            ("Unexpected", [key for key in value if key not in self.keys]),
            ("Missing", [key for key in self.keys if key not in value]),
        )
        return self.changed(
            "Keys",
            ", ".join(f"{what} arguments: {_sorted(keys)}" for what, keys in differences if keys),
        )

    @override
    def build(self, tensors: Iterator[torch.Tensor]) -> Any:
        result = copy.copy(self._template)
        for key, child in zip(self.keys, self.children, strict=True):
            result[key] = child.build(tensors)
        return result


class DataclassNode(Node):
    """An object of a dataclass, whose fields may hold tensors."""

    def __init__(self, name: str, value: Any, leaf: Callable[[str, Any], Node]) -> None:
        super().__init__(name, value)
        self._fields = [field.name for field in dataclasses.fields(value)]
        self.children = [
            describe(f"{name}.{field}", getattr(value, field), leaf) for field in self._fields
        ]
        # Keep what is beside the fields, but none of their tensors.
        self._template = copy.copy(value)
        for field in self._fields:
            object.__setattr__(self._template, field, None)  # (it may be frozen)

    @override
    def collect(self, value: Any, tensors: list[torch.Tensor]) -> None:
        self.check_kind(value)
        for field, child in zip(self._fields, self.children, strict=True):
            child.collect(getattr(value, field), tensors)

    @override
    def build(self, tensors: Iterator[torch.Tensor]) -> Any:
        result = copy.copy(self._template)
        for field, child in zip(self._fields, self.children, strict=True):
            object.__setattr__(result, field, child.build(tensors))
        return result


class CustomNode(Node):
    """An object of a type with a registered parser."""

    def __init__(
        self, name: str, value: Any, parser: ICustomArgParser, leaf: Callable[[str, Any], Node]
    ) -> None:
        super().__init__(name, value)
        self._original = value
        self._parser = parser
        self.children = [
            leaf(f"{name}.yieldTensors()[{i}]", tensor)
            for i, tensor in enumerate(parser.yieldTensors(value))
        ]

    @override
    def collect(self, value: Any, tensors: list[torch.Tensor]) -> None:
        self.check_kind(value)
        found = list(self._parser.yieldTensors(value))
        if len(found) != len(self.children):
            raise self.mismatch("Length", len(self.children), len(found))
        for child, tensor in zip(self.children, found, strict=True):
            child.collect(tensor, tensors)

    @override
    def build(self, tensors: Iterator[torch.Tensor]) -> Any:
        # The iterator yields only tensors that the device computes; the parser takes others from
        # the original.
        mine = [child.build(tensors) for child in self.children if isinstance(child, TensorNode)]
        return self._parser.reconstruct(self._original, iter(mine))


def describe(name: str, value: Any, leaf: Callable[[str, Any], Node]) -> Node:
    """Return the tree of nodes of a value.

    Args:
        name: The user's name for the value.
        value: A tensor, a container, an object with a registered parser, or anything else.
        leaf: Makes the node of a value that is not a container, from its name and value.

    Raises:
        Error: Containers are nested too deeply, or contain themselves.
    """
    if isinstance(value, torch.Tensor):
        return leaf(name, value)
    if name.count("[") > _DEEPEST:
        start = name.partition("[")[0]
        raise Error(
            f"{start} has containers in containers, more than {_DEEPEST} deep, or one that "
            "contains itself. Pass the tensors in a list or dict of their own."
        )
    parser = find_parser(type(value))
    if parser is not None:
        return CustomNode(name, value, parser, leaf)
    if isinstance(value, (list, tuple)):
        return SequenceNode(name, value, leaf)
    if isinstance(value, dict):
        return MappingNode(name, value, leaf)
    return leaf(name, value)


def walk(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield every node of some trees, each before those inside it.

    Args:
        nodes: The roots.
    """
    for node in nodes:
        yield node
        yield from walk(node.children)


def _sorted(keys: list[Any]) -> list[Any]:
    """Return the sorted keys of a dict, by their strings if they cannot be compared."""
    try:
        return sorted(keys)
    except TypeError:
        return sorted(keys, key=str)


def _show(value: object) -> str:
    """Return a value as a string for a message, shortened if it is long."""
    try:
        text = str(value)
    except Exception:  # a user's class may raise anything
        text = object.__repr__(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
