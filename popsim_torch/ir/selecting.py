"""Chooses tensors of a program by a selection, with the spellings of names that anchors accept."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from popsim_torch.errors import closest_names, example_names
from popsim_torch.ir import names
from popsim_torch.tensors import TensorInfo
from popsim_torch.tensors.selections import (
    AllOf,
    AnyOf,
    Glob,
    Named,
    Not,
    Regex,
    Selection,
    words_of,
)

__all__ = [
    "Chosen",
    "choose",
    "find_name",
    "info_of_name",
    "may_take",
    "module_of_name",
    "names_like",
    "near_names",
]


@dataclass(frozen=True)
class Chosen:
    """The tensors that a selection means.

    Attributes:
        tensors: The tensors, in the order in which they were given.
        idle: The parts of the selection that mean none of them.
    """

    tensors: tuple[TensorInfo, ...]
    idle: tuple[Selection, ...]


def choose(selection: Selection, tensors: Sequence[TensorInfo]) -> Chosen:
    """Choose tensors.

    A string that is the name of a tensor, in one of its spellings, means this tensor alone. A
    pattern or regular expression that matches no name is tried on the other spellings of names,
    also where it is a part of a selection: the same one means the same tensors if ``fit`` calls
    the model, which adds ``model.`` to names.

    Args:
        selection: Says which tensors are meant.
        tensors: All tensors of the program.
    """
    taken: set[str] = set()
    idle = []
    known = {one.name: one for one in tensors}
    for part in _parts(selection):
        found = _taken(part, known)
        taken.update(found)
        if not found:
            idle.append(part)
    return Chosen(tuple(one for one in tensors if one.name in taken), tuple(idle))


def find_name(asked: str, known: Container[str]) -> str | None:
    """Return the known name that a user's name stands for; None if there is none."""
    return next((name for name in names.spellings(asked) if name in known), None)


def names_like(asked: str, known: Iterable[str]) -> list[str]:
    """Return the known names that a string of the user means, as in ``choose``.

    Args:
        asked: A name, or a pattern.
        known: The names.
    """
    return _matched(Named(asked), known)


def info_of_name(name: str) -> TensorInfo:
    """Describe a tensor that is computed only if it is asked for: its name is all there is.

    Args:
        name: One of ``Offers.names``.
    """
    kind, phase = names.kind_of(name)
    return TensorInfo(name, None, None, kind, phase, module_of_name(name))


def module_of_name(name: str) -> str:
    """Return the path of the modules that a tensor belongs to, ``layer1.0``; may be empty."""
    return names.scope_of(name).replace("/", ".")


def may_take(selection: Selection, name: str) -> bool:
    """Return whether ``choose`` may choose a tensor that is computed only if it is asked for.

    Args:
        selection: Says which tensors are meant.
        name: The name of the tensor.
    """
    return _widest(selection).takes(info_of_name(name))


def near_names(selection: Selection, known: Sequence[str]) -> list[str]:
    """Return the names that are most similar to a selection that means none, at most five.

    Args:
        selection: The selection.
        known: The names of all tensors.
    """
    words = selection.pattern if isinstance(selection, Glob) else words_of(selection)
    words = "".join(letter for letter in words if letter not in "*?[]")
    return closest_names(words, known) or example_names(words, known)


def _parts(selection: Selection) -> Iterator[Selection]:
    if not isinstance(selection, AnyOf):
        yield selection
        return
    for part in selection.parts:
        yield from _parts(part)


def _taken(part: Selection, known: Mapping[str, TensorInfo]) -> list[str]:
    found = _with_names(part, lambda leaf, _: _Names(frozenset(_matched(leaf, known))))
    return [name for name, one in known.items() if found.takes(one)]


# The selections of which only the name of a tensor decides.
_Leaf = Glob | Regex


@dataclass(frozen=True)
class _Names(Selection):
    """Tensors with one of some names."""

    names: frozenset[str]

    def takes(self, tensor: TensorInfo) -> bool:
        return tensor.name in self.names


@dataclass(frozen=True)
class _Spelt(Selection):
    """Tensors of which a pattern matches the name in any spelling."""

    leaf: _Leaf

    def takes(self, tensor: TensorInfo) -> bool:
        return _matches_spelling(self.leaf, tensor.name)


def _with_names(
    selection: Selection, change: Callable[[_Leaf, bool], Selection], is_meant: bool = True
) -> Selection:
    """Return a selection with its names and patterns changed.

    Args:
        selection: The selection.
        change: Returns what replaces a name or pattern. Its other argument says whether the
            selection means more if this part does; otherwise it means less.
        is_meant: What ``change`` gets for ``selection`` itself.
    """
    match selection:
        case Glob() | Regex():
            return change(selection, is_meant)
        case AnyOf() | AllOf():
            parts = (_with_names(part, change, is_meant) for part in selection.parts)
            return type(selection)(tuple(parts))
        case Not():
            return Not(_with_names(selection.part, change, not is_meant))
    return selection


def _widest(selection: Selection) -> Selection:
    """Return a selection of all that one may mean, whichever of its patterns match as written."""
    return _with_names(selection, lambda leaf, is_meant: _Spelt(leaf) if is_meant else leaf)


def _matched(leaf: _Leaf, known: Iterable[str]) -> list[str]:
    """Return the names of a program that a name or pattern of the user means."""
    known = list(known)
    if isinstance(leaf, Named):
        exact = find_name(leaf.pattern, set(known))
        if exact is not None:
            return [exact]
        if not leaf.is_pattern:
            return []
    found = [name for name in known if leaf.matches(name)]
    return found or [name for name in known if _matches_spelling(leaf, name)]


def _matches_spelling(leaf: _Leaf, name: str) -> bool:
    return any(map(leaf.matches, names.spellings(name)))
