"""Whether what two runs have in common is enough to call them equal."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from popsim_torch.records.kinds import is_given, is_learned
from popsim_torch.records.prefixes import Prefixes, Tensors
from popsim_torch.records.tensors import RecordedTensor, printable
from popsim_torch.records.text import listed, type_text

__all__ = ["Known", "about_prefixes", "what_is_missing"]

_LEARNED = "weight, gradient or updated weight"


@dataclass(frozen=True)
class Known:
    """The tensors of a run.

    Attributes:
        details: What the run says of each tensor.
        recorded: The names of those with records, in order.
    """

    details: Tensors
    recorded: Sequence[str]

    def learned(self, among: Collection[str]) -> list[str]:
        """Return those of some names that are weights, or their gradients or updated values."""
        return [name for name in among if self._is(is_learned, name)]

    def are_given(self, among: Collection[str]) -> bool:
        """Return whether the model gets all of some tensors, and makes none of them."""
        return all(self._is(is_given, name) for name in among)

    def _is(self, test: Callable[[RecordedTensor], bool], name: str) -> bool:
        return test(self.details.get(name, RecordedTensor(name)))


def what_is_missing(
    a: Known,
    b: Known,
    pairs: Mapping[str, str],
    unlike: Sequence[tuple[str, str]],
    compared: Collection[str],
) -> Iterator[str]:
    """Yield why two runs may differ although nothing that was compared does.

    Args:
        a: One run.
        b: The other run.
        pairs: The names that correspond.
        unlike: Names of a and b that are the same, and belong to different tensors.
        compared: The names of run a that were compared.
    """
    if compared and a.are_given(compared):
        yield f"Only inputs and hyper-parameters were compared: {listed(sorted(compared))}."
    ours, theirs = (run.learned(run.details) for run in (a, b))
    with_a, with_b = (run.learned(run.recorded) for run in (a, b))
    if ours and theirs and pairs.keys().isdisjoint(ours):
        yield (
            f"No {_LEARNED} of a has a counterpart in b. a has {listed(ours)}; b has "
            f"{listed(theirs)}. Names may differ in the path before the model, as in fit, not in "
            "the model itself."
        )
    elif compared and with_a and with_b and not a.learned(compared):
        yield (
            f"No {_LEARNED} was compared. a has records of {listed(with_a)}; b has records of "
            f"{listed(with_b)}. Record the same tensors in the same steps."
        )
    recorded_a, recorded_b = set(a.recorded), set(b.recorded)
    others = [
        f"{one} ({_what(a.details[one])} in a, {_what(b.details[other])} in b)"
        for one, other in unlike
        if one in recorded_a and other in recorded_b and not a.are_given([one])
    ]
    if others:
        yield f"Not compared, because the shape or kind is another one in b: {listed(others)}."


def _what(tensor: RecordedTensor) -> str:
    """Return shape, dtype and kind of a tensor, as far as they are known."""
    return f"{type_text(tensor)} {tensor.kind}".rstrip()


def about_prefixes(prefixes: Prefixes) -> Iterator[str]:
    """Yield a line on how the names of two runs differ."""
    a, b = (f"'{printable(path)}.'" if path else "" for path in (prefixes.a, prefixes.b))
    if a and b:
        yield f"Names begin with {a} in a, and with {b} in b."
    elif a or b:
        run, other = "ab" if a else "ba"
        yield f"Names in {run} begin with {a or b}, those in {other} do not."
