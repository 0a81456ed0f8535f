"""The path of one model in two runs: ``fit`` and ``poptorch.function`` put it into a larger one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from popsim_torch.ir import names
from popsim_torch.records.kinds import are_alike, is_learned, is_module_output
from popsim_torch.records.tensors import RecordedTensor

__all__ = ["Prefixes", "Tensors", "find_prefixes", "inside"]

Tensors = Mapping[str, RecordedTensor]
"""What a run says of its tensors, by name, in the order of its program."""

_MOST_MODULES = 32
"""The depth to which a model is looked for in a larger one; files may have any names."""
_MOST_COUNTERPARTS = 64
"""A last part that more names have, such as ``weight``, does not say which one is meant."""


@dataclass(frozen=True)
class Prefixes:
    """The path of the same model in two runs.

    Attributes:
        a: The module path of the model in run a, such as ``model`` in ``fit``; empty if names begin
            with the model's own modules.
        b: The same for run b.
    """

    a: str = ""
    b: str = ""


def find_prefixes(a: Tensors, b: Tensors) -> Prefixes:
    """Find the path of the same model in two runs, from the names of weights.

    Weights, their gradients and updated values have the same last parts in both: ``fc.weight`` is
    ``model.fc.weight`` in ``fit``, and ``net.fc.weight`` in a function that has the model in a
    variable ``net``. The paths are those that most of these names agree on, with equal shapes.

    Args:
        a: The tensors of one run.
        b: The tensors of the other run.

    Returns:
        The paths. Both are empty if the names are the same, if fewer than half of the names of both
        runs agree on others, or if several paths fit equally well.
    """
    ours, theirs = ([one for one in run.values() if is_learned(one)] for run in (a, b))
    votes = _votes(ours, theirs)
    most = max(votes.values(), default=0)
    best = [paths for paths, number in votes.items() if number == most]
    is_clear = len(best) == 1 and 2 * most >= min(len(ours), len(theirs))
    if ("", "") in best or not is_clear:
        return Prefixes()
    return Prefixes(*best[0])


def inside(tensors: Tensors, path: str) -> dict[str, RecordedTensor]:
    """Return tensors by the names that they have if a module is the whole model.

    Results of ops outside of all modules are left out: their names are numbers of ops, and mean
    other tensors in other programs.

    Args:
        tensors: The tensors of a run.
        path: The module path of the model.
    """
    if not path:
        return dict(tensors)
    found = {}
    for one in tensors.values():
        name = names.inside_module(one.name, path)
        if name is not None:
            module = one.module.removeprefix(path).removeprefix(".")
            found[name] = replace(one, module=module)
    for one in tensors.values():
        if names.inside_module(one.name, path) is None and not _is_numbered(one):
            found.setdefault(one.name, one)
    return found


def _is_numbered(tensor: RecordedTensor) -> bool:
    """Return whether the name of a tensor is a number of an op, or stands for the whole model."""
    is_result = ":" in tensor.name or is_module_output(tensor)
    return (is_result and not tensor.module) or names.is_partial_gradient(tensor.name)


def _votes(ours: list[RecordedTensor], theirs: list[RecordedTensor]) -> Counter[tuple[str, str]]:
    """Count which paths make names of two runs equal.

    A name votes for the paths before the longest last parts that a name of the other run has, too.
    It does not vote if too many names of the other run have them.
    """
    index: dict[tuple[str, str], list[tuple[str, RecordedTensor]]] = defaultdict(list)
    for other in theirs:
        for path, key in _splits(other.name):
            index[key].append((path, other))
    votes: Counter[tuple[str, str]] = Counter()
    for one in ours:
        for path, key in _splits(one.name):
            others = index.get(key, ())
            if len(others) > _MOST_COUNTERPARTS:
                break
            found = {(path, of_other) for of_other, other in others if are_alike(one, other)}
            if found:
                votes.update(found)
                break
    return votes


def _splits(name: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield each path that a name may begin with, and what is left: a shorter rest each time."""
    lead, tensor = names.lead_and_tensor(name)
    parts = tensor.split(".", _MOST_MODULES)
    for i in range(len(parts)):
        yield ".".join(parts[:i]), (lead, ".".join(parts[i:]))
