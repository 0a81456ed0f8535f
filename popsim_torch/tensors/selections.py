"""The classes of selections, and how what the user gives becomes one of them."""

from __future__ import annotations

import fnmatch
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from popsim_torch.errors import UsageTypeError, UsageValueError
from popsim_torch.tensors.info import TensorInfo

__all__ = [
    "AllOf",
    "AnyOf",
    "Glob",
    "Named",
    "Not",
    "OfDtype",
    "OfKind",
    "OfModule",
    "OfStage",
    "Predicate",
    "Regex",
    "Select",
    "Selection",
    "as_selection",
    "has_function",
    "has_wildcards",
    "is_plain_name",
    "words_of",
]

_WILDCARDS = re.compile(r"[*?\[]")
_OUTER = "model."


class Selection(ABC):
    """Says which tensors are meant; ``&``, ``|`` and ``~`` combine selections."""

    @abstractmethod
    def takes(self, tensor: TensorInfo) -> bool:
        """Return whether a tensor is meant.

        Args:
            tensor: The tensor.
        """

    def __and__(self, other: Select) -> Selection:
        return AllOf((self, as_selection("&", other)))

    def __rand__(self, other: Select) -> Selection:
        return AllOf((as_selection("&", other), self))

    def __or__(self, other: Select) -> Selection:
        return AnyOf((self, as_selection("|", other)))

    def __ror__(self, other: Select) -> Selection:
        return AnyOf((as_selection("|", other), self))

    def __invert__(self) -> Selection:
        return Not(self)


Select: TypeAlias = (
    str | re.Pattern[str] | Selection | Callable[[TensorInfo], bool] | Sequence["Select"]
)
"""Everything that is a selection."""


@dataclass(frozen=True)
class Glob(Selection):
    """A pattern for a whole name, such as ``Glob("fc?.*_grad")``.

    ``*`` stands for any characters, ``?`` for one, ``[abc]`` for one of the listed characters;
    upper and lower case differ.
    """

    pattern: str
    """The pattern that a name has to match."""

    def takes(self, tensor: TensorInfo) -> bool:
        """Return whether the name of a tensor matches.

        Args:
            tensor: The tensor.
        """
        return self.matches(tensor.name)

    def matches(self, name: str) -> bool:
        """Return whether a name matches.

        Args:
            name: The name of a tensor, or the key of a queue.
        """
        return fnmatch.fnmatchcase(name, self.pattern)


@dataclass(frozen=True)
class Named(Glob):
    """A string of the user: a name if a tensor has it, otherwise a pattern."""

    @property
    def is_pattern(self) -> bool:
        """Whether it has wildcards; otherwise it can only be a name."""
        return has_wildcards(self.pattern)

    def matches(self, name: str) -> bool:
        """Return whether it is the name, or a pattern that the name matches.

        Args:
            name: The name of a tensor.
        """
        return name == self.pattern or (self.is_pattern and super().matches(name))


@dataclass(frozen=True)
class Regex(Selection):
    """A regular expression that may match anywhere in a name."""

    pattern: str
    flags: int

    def takes(self, tensor: TensorInfo) -> bool:
        """Return whether the expression matches in the name of a tensor."""
        return self.matches(tensor.name)

    def matches(self, name: str) -> bool:
        """Return whether the expression matches in a name.

        Args:
            name: The name of a tensor.
        """
        return re.search(self.pattern, name, self.flags) is not None


@dataclass(frozen=True)
class Predicate(Selection):
    """A function of the user; it cannot be written to a file."""

    function: Callable[[TensorInfo], Any]

    def takes(self, tensor: TensorInfo) -> bool:
        """Return what the function says; it is not asked about tensors without a shape."""
        return tensor.shape is not None and bool(self.function(tensor))


@dataclass(frozen=True)
class OfKind(Selection):
    """Tensors of some kinds."""

    kinds: tuple[str, ...]

    def takes(self, tensor: TensorInfo) -> bool:
        """Return whether a tensor is of one of the kinds."""
        return tensor.kind in self.kinds


@dataclass(frozen=True)
class OfModule(Selection):
    """Tensors of the modules that a pattern matches, and of the modules inside of them."""

    pattern: str

    def takes(self, tensor: TensorInfo) -> bool:
        """Return whether a tensor belongs to one of the modules."""
        pattern, path = self.pattern, tensor.module
        # `fit` calls the model inside of a function, which is one more part of the path.
        paths = (path, path.removeprefix(_OUTER))
        return any(
            fnmatch.fnmatchcase(own, pattern) or fnmatch.fnmatchcase(own, f"{pattern}.*")
            for own in paths
        )


@dataclass(frozen=True)
class OfDtype(Selection):
    """Tensors of some dtypes."""

    dtypes: tuple[torch.dtype, ...]

    def takes(self, tensor: TensorInfo) -> bool:
        """Return whether a tensor has one of the dtypes."""
        return tensor.dtype in self.dtypes


@dataclass(frozen=True)
class OfStage(Selection):
    """Tensors of some pipeline stages."""

    stages: tuple[int, ...]

    def takes(self, tensor: TensorInfo) -> bool:
        """Return whether a tensor is on one of the stages."""
        return tensor.stage in self.stages


@dataclass(frozen=True)
class AnyOf(Selection):
    """Tensors that at least one of some selections means."""

    parts: tuple[Selection, ...]

    def takes(self, tensor: TensorInfo) -> bool:
        """Return whether one of the selections means a tensor."""
        return any(part.takes(tensor) for part in self.parts)


@dataclass(frozen=True)
class AllOf(Selection):
    """Tensors that all of some selections mean."""

    parts: tuple[Selection, ...]

    def takes(self, tensor: TensorInfo) -> bool:
        """Return whether all of the selections mean a tensor."""
        return all(part.takes(tensor) for part in self.parts)


@dataclass(frozen=True)
class Not(Selection):
    """Tensors that a selection does not mean."""

    part: Selection

    def takes(self, tensor: TensorInfo) -> bool:
        """Return whether the selection does not mean a tensor."""
        return not self.part.takes(tensor)


def has_function(selection: Selection) -> bool:
    """Return whether a function of the user is a part of a selection."""
    match selection:
        case Predicate():
            return True
        case AnyOf() | AllOf():
            return any(map(has_function, selection.parts))
        case Not():
            return has_function(selection.part)
    return False


def has_wildcards(text: str) -> bool:
    """Return whether a string may be a pattern: it has a ``*``, ``?`` or ``[``."""
    return _WILDCARDS.search(text) is not None


def is_plain_name(select: object) -> bool:
    """Return whether a selection can only be the name of one tensor."""
    return isinstance(select, str) and not has_wildcards(select)


def as_selection(where: str, select: Any) -> Selection:
    """Return what the user gave as a ``Selection``.

    Args:
        where: The caller, for messages.
        select: A selection, see the module.

    Raises:
        UsageTypeError: It is something else.
        UsageValueError: It is an empty list.
    """
    if isinstance(select, Selection):
        return select
    if isinstance(select, str):
        return Named(select)
    if isinstance(select, re.Pattern) and isinstance(select.pattern, str):
        return Regex(select.pattern, select.flags)
    if isinstance(select, (list, tuple, set, frozenset)):
        if not select:
            raise UsageValueError(
                f"{where}: an empty {type(select).__name__} selects nothing. Pass a name or a "
                "pattern, or leave the call out."
            )
        return AnyOf(tuple(as_selection(where, one) for one in select))
    if callable(select) and not isinstance(select, (type, torch.nn.Module)):
        return Predicate(select)
    raise UsageTypeError(
        f"{where}: a {type(select).__name__} selects no tensors. Pass a name, a pattern such as "
        "'Gradient___*.weight', a regular expression from re.compile of a string, a function of a "
        "TensorInfo, something of poptorch.tensors, or a list of these."
    )


def words_of(selection: Selection) -> str:
    """Return a selection as the user may have written it, for messages."""
    match selection:
        case Glob():
            return repr(selection.pattern)
        case Regex():
            return f"re.compile({selection.pattern!r})"
        case Predicate():
            return f"the function {getattr(selection.function, '__qualname__', 'given')}"
        case AnyOf():
            return " | ".join(map(words_of, selection.parts))
        case AllOf():
            return " & ".join(map(words_of, selection.parts))
        case Not():
            return f"~({words_of(selection.part)})"
    return repr(selection)
