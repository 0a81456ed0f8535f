"""Chooses tensors of a program by a selection, with the spellings of names that anchors accept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from popsim_torch.errors import closest_names, example_names
from popsim_torch.ir import names
from popsim_torch.tensors import TensorInfo
from popsim_torch.tensors.selections import AnyOf, Glob, Named, Selection, words_of

__all__ = [
    "Chosen",
    "choose",
    "find_name",
    "info_of_name",
    "may_take",
    "module_of_name",
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
    pattern that matches no name is tried on the other spellings of names.

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


def find_name(asked: str, known: Mapping[str, object]) -> str | None:
    """Return the known name that a user's name stands for; None if there is none."""
    return next((name for name in names.spellings(asked) if name in known), None)


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
    info = info_of_name(name)
    return any(
        part.takes(info) or (isinstance(part, Glob) and _matches_spelling(part, name))
        for part in _parts(selection)
    )


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
    if isinstance(part, Named):
        exact = find_name(part.pattern, known)
        if exact is not None:
            return [exact]
        if not part.is_pattern:
            return []
    found = [name for name, one in known.items() if part.takes(one)]
    if not found and isinstance(part, Glob):
        found = [name for name in known if _matches_spelling(part, name)]
    return found


def _matches_spelling(glob: Glob, name: str) -> bool:
    return any(glob.matches(spelling) for spelling in names.spellings(name))
