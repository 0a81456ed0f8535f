"""Which tensors of two runs correspond: those of one name, and outputs of modules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from popsim_torch.ir import names
from popsim_torch.records.kinds import are_alike
from popsim_torch.records.prefixes import Prefixes, Tensors, find_prefixes, inside
from popsim_torch.records.tensors import FURTHER_OUTPUT, OUTPUT

__all__ = ["pair_tensors", "unlike_tensors"]


def pair_tensors(a: Tensors, b: Tensors, prefixes: Prefixes | None = None) -> dict[str, str]:
    """Return the tensors that correspond: names of one run, with the names of the other.

    Tensors with the same name correspond, except for the path of the model in each run, if their
    shapes and kinds are not different ones. PyTorch records what a module returns, ``fc1``, and a
    program names the results of its ops, ``fc1/Gemm:0``: the first output of a module is its last
    result of the same shape that is the first one of its op. If a module is called several times,
    its results are divided among the calls. The gradients of tensors that correspond do so, too.

    Args:
        a: The tensors of one run, in the order of its program.
        b: The tensors of the other run.
        prefixes: The path of the model in each run; None to find it.
    """
    prefixes = prefixes or find_prefixes(a, b)
    ours, theirs = inside(a, prefixes.a), inside(b, prefixes.b)
    return {ours[one].name: theirs[other].name for one, other in _pairs(ours, theirs).items()}


def unlike_tensors(a: Tensors, b: Tensors, prefixes: Prefixes) -> list[tuple[str, str]]:
    """Return the names of tensors that have the same name and other shapes or kinds.

    Args:
        a: The tensors of one run.
        b: The tensors of the other run.
        prefixes: The path of the model in each run.
    """
    ours, theirs = inside(a, prefixes.a), inside(b, prefixes.b)
    return [
        (one.name, theirs[name].name)
        for name, one in ours.items()
        if name in theirs and not are_alike(one, theirs[name])
    ]


def _pairs(a: Tensors, b: Tensors) -> dict[str, str]:
    """Pair tensors of two runs in which the same module is the whole model."""
    pairs = {name: name for name in _same_names(a, b)}
    for ours, theirs in _outputs(a, b):
        pairs.setdefault(ours, theirs)
    taken = set(pairs.values())
    for theirs, ours in _outputs(b, a):
        if ours not in pairs and theirs not in taken:
            pairs[ours] = theirs
    for ours, theirs in list(pairs.items()):
        gradient, other = names.gradient(ours), names.gradient(theirs)
        if gradient in a and other in b and are_alike(a[gradient], b[other]):
            pairs.setdefault(gradient, other)
    return pairs


def _same_names(a: Tensors, b: Tensors) -> Iterator[str]:
    """Yield the names that mean the same tensor in both runs.

    A number in the name of a result may mean an op of the user in one program, and one that starts
    the backward pass in another. Only the former comes from a line of code.
    """
    both = [name for name in a if name in b]
    know_lines = _knows_lines(a) and _knows_lines(b)
    others = {
        name
        for name in both
        if not are_alike(a[name], b[name])
        or (
            know_lines
            and names.result_parts(name) is not None
            and bool(a[name].source) != bool(b[name].source)
        )
    }
    others |= {names.gradient(name) for name in others}
    return (name for name in both if name not in others)


def _knows_lines(run: Tensors) -> bool:
    """Return whether a run says which lines of code its tensors come from."""
    return any(one.source for one in run.values())


def _outputs(eager: Tensors, program: Tensors) -> Iterator[tuple[str, str]]:
    """Yield the outputs of modules that one run has, with the results of the other run."""
    outputs: dict[str, list[str]] = defaultdict(list)
    further: dict[str, list[str]] = defaultdict(list)
    for name, tensor in eager.items():
        if tensor.kind in (OUTPUT, FURTHER_OUTPUT) and name not in program:
            (outputs if tensor.kind == OUTPUT else further)[tensor.module].append(name)
    results = _results(program)
    for module, calls in outputs.items():
        if any(eager[name].shape == eager[calls[0]].shape for name in further[module]):
            continue  # which of them is the last result is not known
        for shape in dict.fromkeys(eager[name].shape for name in calls):
            of_shape = [name for name in calls if eager[name].shape == shape]
            found = [
                name
                for name in results.get(module, ())
                if shape is None or program[name].shape in (None, shape)
            ]
            # Without shapes, a transposed weight may be the last result.
            is_guess = shape is not None and all(program[name].shape is None for name in found)
            if not is_guess or len(found) == len(of_shape):
                yield from _divided(of_shape, found)


def _divided(calls: list[str], results: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the outputs of calls of a module, with the last result of each call."""
    if len(calls) > 1:
        results = [name for name in results if _op(name) == _op(results[-1])]
    each, rest = divmod(len(results), len(calls))
    if each and not rest:
        yield from zip(calls, results[each - 1 :: each], strict=True)


def _results(program: Tensors) -> dict[str, list[str]]:
    """Return the forward results by module, in order; of an op with several, the first one.

    A program lists tensors without a shape, too, which it only computes if they are anchored. What
    has a shape and no line of code is not of the user's model: it starts the backward pass, or
    makes a weight ready.
    """
    found: dict[str, list[str]] = defaultdict(list)
    knows_lines = _knows_lines(program)
    for name, tensor in program.items():
        parts = names.result_parts(name)
        is_of_user = bool(tensor.source) or tensor.shape is None or not knows_lines
        if parts is not None and parts.output == 0 and is_of_user:
            found[tensor.module or parts.scope.replace("/", ".")].append(name)
    computed = {name for name, tensor in program.items() if tensor.shape is not None}
    return {
        module: [name for name in results if name in computed] or results
        for module, results in found.items()
    }


def _op(name: str) -> str | None:
    parts = names.result_parts(name)
    return parts.op_type if parts else None
