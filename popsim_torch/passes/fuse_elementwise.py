"""Fuses chains of ``map`` ops, so that a chain reads and writes memory once.

A ``map`` op whose only reader is another one of the same shape becomes part of it. The values are
equal to the last bit: results that were stored as float16 are still rounded to float16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from popsim_torch.ir import Graph, Op, TensorKind
from popsim_torch.ir.map_code import MapCode, num_instructions
from popsim_torch.passes.patterns import Match, OpPattern, Pattern, Rewrite, rewrite, whole

__all__ = ["REWRITES", "fuse_elementwise"]

_MAX_INSTRUCTIONS = 48


def fuse_elementwise(graph: Graph) -> int:
    """Fuse ``map`` ops in place; see ``rewrite``."""
    return rewrite(graph, REWRITES)


def _writes_one_value(match: Match, op: Op) -> bool:
    return len(op.outputs) == 1 and match.tensor(op.outputs[0]).kind == TensorKind.VALUE


def _fits(match: Match) -> bool:
    first, second = match.ops["first"], match.ops["second"]
    seen = match.tensor(second.inputs[match.positions["second"]])
    return (
        seen.shape == match.root(seen.id).shape == match.tensor(second.outputs[0]).shape
        and match.run_together("first", "second")
        and not match.uses.reads_changed(first)
        and num_instructions(first) + num_instructions(second) < _MAX_INSTRUCTIONS
    )


def _joined(match: Match) -> Mapping[str, Op]:
    first, second = match.ops["first"], match.ops["second"]
    code = MapCode.of(first)
    value = code.stored(code.results[0], match.tensor(first.outputs[0]).dtype)
    seen = second.inputs[match.positions["second"]]
    code.results = code.append(second, {seen: value})
    attributes = {**second.attributes, **code.attributes()}
    return {"second": replace(second, inputs=code.inputs, attributes=attributes)}


_CHAIN = Pattern(
    seed=OpPattern("second", "map", among=whole("value"), where=_writes_one_value),
    others=[OpPattern("first", "map", output="value", where=_writes_one_value)],
    inner=["value"],
    where=_fits,
)

REWRITES = (
    Rewrite(
        "map",
        "A chain of elementwise ops is one ``map``, which reads and writes memory once.",
        _CHAIN,
        _joined,
    ),
)
