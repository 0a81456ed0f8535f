"""Which tensors of two runs correspond: those of one name, and outputs of modules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from popsim_torch.ir import names
from popsim_torch.records.tensors import FURTHER_OUTPUT, OUTPUT, RecordedTensor

__all__ = ["pair_tensors"]

Tensors = Mapping[str, RecordedTensor]


def pair_tensors(a: Tensors, b: Tensors) -> dict[str, str]:
    """Return the tensors that correspond: names of one run, with the names of the other.

    Tensors with the same name correspond. PyTorch records what a module returns, ``fc1``, and a
    program names the results of its ops, ``fc1/Gemm:0``: the first output of a module is its last
    result of the same shape that is the first one of its op. If a module is called several times,
    its results are divided among the calls. The gradients of tensors that correspond do so, too.

    Args:
        a: The tensors of one run, in the order of its program.
        b: The tensors of the other run.
    """
    pairs = {name: name for name in a if name in b}
    for ours, theirs in _outputs(a, b):
        pairs.setdefault(ours, theirs)
    taken = set(pairs.values())
    for theirs, ours in _outputs(b, a):
        if ours not in pairs and theirs not in taken:
            pairs[ours] = theirs
    for ours, theirs in list(pairs.items()):
        gradient, other = names.gradient(ours), names.gradient(theirs)
        if gradient in a and other in b:
            pairs.setdefault(gradient, other)
    return pairs


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

    A program lists tensors without a shape, too, which it only computes if they are anchored.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for name, tensor in program.items():
        parts = names.result_parts(name)
        if parts is not None and parts.output == 0:
            found[tensor.module or parts.scope.replace("/", ".")].append(name)
    computed = {name for name, tensor in program.items() if tensor.shape is not None}
    return {
        module: [name for name in results if name in computed] or results
        for module, results in found.items()
    }


def _op(name: str) -> str | None:
    parts = names.result_parts(name)
    return parts.op_type if parts else None
