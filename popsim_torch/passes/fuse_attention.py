"""Fuses the ops of attention, so that scores and probabilities stay in the caches.

A product, a ``map`` (scale, mask), a softmax and another product become one ``attention``. In
training, the gradients of the products, of the softmax and of the ``map`` become one
``attention_grad``. It computes the probabilities again instead of reading them, unless they are
few.

The pass requires that no other op reads the values that are no longer written, and that all ops
belong to one phase and stage. The values are equal to the last bit: both ops compute and round like
the separate ones. Names of tensors that are no longer computed stay in the graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from popsim_torch._native import min_cut_work
from popsim_torch.ir import Graph, Op, Phase, Tensor, TensorKind
from popsim_torch.ir.graph import NO_TENSOR
from popsim_torch.ir.map_code import MapCode
from popsim_torch.passes.patterns import (
    Match,
    Operand,
    OpPattern,
    Pattern,
    Rewrite,
    operand,
    rewrite,
)

__all__ = ["REWRITES", "fuse_attention"]

_MAX_KEPT = 1 << 20
"""Most probabilities, over all heads, that are kept for the gradient. Computing them again costs
up to 3% of a training step of an encoder layer with 64 to 256 positions. With 512 and more, the
fused ops are 5 to 10% faster than the separate ones nevertheless, and the arena is a fifth to a
half of theirs. Measured with 8 to 64 heads of width 64."""

_DTYPES = (torch.float16, torch.float32)
_FORWARD = ("scores", "map", "softmax", "product")
_BACKWARD = ("for_weights", "softmax_grad", "map_grad", "for_q", "for_k", "for_v")


def fuse_attention(graph: Graph) -> int:
    """Fuse the ops of attention, in place; see ``rewrite``."""
    return rewrite(graph, REWRITES)


# --- The form in which the ops read the matrices between the products ---


@dataclass(frozen=True)
class _Scores:
    """Shape and dtype of the matrices between the products."""

    batch: int
    rows: int
    columns: int
    dtype: torch.dtype

    @classmethod
    def of(cls, match: Match) -> _Scores:
        """Return the shape and dtype of the probabilities."""
        tensor = match.tensor(match.ops["softmax"].outputs[0])
        *batch, rows, columns = tensor.shape
        return cls(math.prod(batch), rows, columns, tensor.dtype)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.batch * self.rows * self.columns


def _is_whole(match: Match, seen: Tensor) -> bool:
    """Return whether a tensor is all matrices, one after the other."""
    scores = _Scores.of(match)
    matrices = (scores.batch, scores.rows, scores.columns)
    whole = (math.prod(seen.shape[:-2]), *seen.shape[-2:]) == matrices
    return whole and seen.covers(match.graph.root(seen))


def _is_transposed(match: Match, seen: Tensor) -> bool:
    scores = _Scores.of(match)
    size = scores.rows * scores.columns
    return (
        seen.shape == (scores.batch, scores.columns, scores.rows)
        and seen.strides == (size, 1, scores.columns)
        and seen.offset == 0
    )


def _matrices(name: str) -> Operand:
    return Operand(name, _is_whole)


def _transposed(name: str) -> Operand:
    return Operand(name, _is_transposed)


# --- Conditions of single ops ---


def _is_softmax(match: Match, op: Op) -> bool:
    shape, dtype = match.tensor(op.outputs[0]).shape, match.tensor(op.outputs[0]).dtype
    return (
        not op.attributes["log"]
        and len(shape) >= 3
        and op.attributes["axis"] == len(shape) - 1
        and math.prod(shape[:-2]) > 1
        and dtype in _DTYPES
        and _is_whole(match, match.tensor(op.inputs[0]))
    )


def _is_softmax_grad(match: Match, op: Op) -> bool:
    axis = len(match.tensor(op.inputs[1]).shape) - 1
    return not op.attributes["log"] and op.attributes["axis"] == axis


def _maps_scores(match: Match, op: Op) -> bool:
    """Return whether a ``map`` has one result, and reads one product or softmax gradient."""
    made = [
        tensor_id
        for tensor_id in op.inputs
        if (writers := match.uses.writers(tensor_id))
        and writers[0].kind in ("matmul", "softmax_grad")
        and _is_whole(match, match.tensor(tensor_id))
    ]
    return (
        made == [op.inputs[match.positions[_name_of(match, op)]]]
        and len(op.outputs) == 1
        and _is_whole(match, match.tensor(op.outputs[0]))
    )


def _name_of(match: Match, op: Op) -> str:
    return next(name for name, found in match.ops.items() if found is op)


def _is_product(match: Match, op: Op) -> bool:
    """Return whether an op multiplies batches of matrices, and does nothing else."""
    return len(op.inputs) <= 2 and _is_product_on_top(match, op)


def _is_product_on_top(match: Match, op: Op) -> bool:
    """Return whether an op multiplies batches of matrices, and maybe adds to a tensor."""
    tensors = [match.tensor(tensor_id) for tensor_id in op.inputs[:2]]
    return (
        len(op.inputs) <= 3
        and "activation" not in op.attributes
        and "partials" not in op.attributes
        and all(op.attributes.get(name, 1.0) == 1.0 for name in ("alpha", "beta"))
        and all(len(t.shape) == 3 and t.shape[0] > 1 and t.strides[0] != 0 for t in tensors)
    )


# --- Conditions of all ops together ---


def _precision(match: Match) -> dict[str, Any]:
    """Return the attribute of the fused ops: that of all their products."""
    attributes = match.ops["product"].attributes
    return {"precision": attributes["precision"]} if "precision" in attributes else {}


def _fits(match: Match) -> bool:
    ops, scores = match.ops, _Scores.of(match)
    precisions = {op.attributes.get("precision") for op in ops.values() if op.kind == "matmul"}
    inner = {match.tensors[name] for name in _INNER if name in match.tensors}
    backward = [name for name in _BACKWARD if name in ops]
    depth = match.tensor(ops["scores"].inputs[0]).shape[-1]
    width = match.tensor(ops["product"].inputs[1]).shape[-1]
    return (
        all(match.tensor(root).dtype == scores.dtype for root in inner)
        and len(precisions) == 1
        # Smaller products, in batches, are summed in another order.
        and scores.rows * scores.columns * min(depth, width) >= min_cut_work()
        and ("softmax_grad" not in ops or "for_q" in ops or "for_k" in ops)
        # In the backward pass these are ops that are computed again (passes/recompute.py).
        and _run_together(match, _FORWARD, ops["softmax"].phase)
        and _run_together(match, _BACKWARD, Phase.BACKWARD)
        and (
            not backward
            or ops["product"].phase != Phase.BACKWARD
            or match.uses.position(ops["product"]) < match.uses.position(match.first(*backward))
        )
    )


def _run_together(match: Match, names: tuple[str, ...], phase: Phase) -> bool:
    """Return whether ops run in one place, and whether their inputs stay unchanged."""
    ops = [match.ops[name] for name in names if name in match.ops]
    return all(
        op.phase == phase
        and op.stage == ops[0].stage
        and all(_is_fixed(match, root) for root in match.graph.roots(op.inputs))
        for op in ops
    )


def _is_fixed(match: Match, root: Tensor) -> bool:
    writers = match.uses.writers(root.id)
    if root.kind == TensorKind.VARIABLE:
        return all(op.phase in (Phase.SETUP, Phase.UPDATE) for op in writers)
    return len(writers) <= 1


# --- The new ops ---


@dataclass(frozen=True)
class _Map:
    """A ``map`` of scores in the attributes of the fused op: value 0 is the scores."""

    others: list[int]
    attributes: dict[str, Any]


def _map_of(match: Match, name: str) -> _Map:
    scores, op = _Scores.of(match), match.ops.get(name)
    code, shape = MapCode(), [scores.batch, scores.rows, scores.columns]
    if op is None:
        code.results = [code.input(NO_TENSOR)]  # the scores, unchanged
    else:
        code, shape = MapCode.of(op), list(match.tensor(op.outputs[0]).shape)
        code.put_first(op.inputs[match.positions[name]])
    attributes: Any = code.attributes()
    (result,) = attributes.pop("results")
    return _Map(code.inputs[1:], {**attributes, "result": result, "shape": shape})


def _fused(match: Match) -> Mapping[str, Op] | None:
    ops, has_backward = match.ops, any(name in match.ops for name in _BACKWARD)
    forward = _forward_op(match, keep=has_backward and _Scores.of(match).numel <= _MAX_KEPT)
    if not has_backward:
        return {"product": forward}
    first = match.first(*_BACKWARD)
    backward = _backward_op(match, forward, first)
    if not _is_written_before(match, backward, first):
        return None
    name = next(name for name in _BACKWARD if ops.get(name) is first)
    return {"product": forward, name: backward}


def _forward_op(match: Match, *, keep: bool) -> Op:
    product, mapped = match.ops["product"], _map_of(match, "map")
    q, k, *initial = match.ops["scores"].inputs
    safe = bool(match.ops["softmax"].attributes.get("safe", False))
    return Op(
        "attention",
        [q, k, product.inputs[1], *(initial or [NO_TENSOR]), *mapped.others],
        [*product.outputs, product.inputs[0] if keep else NO_TENSOR],
        {**mapped.attributes, "safe": safe, **_precision(match)},
        product.phase,
        product.stage,
        product.name,
        product.origin,
    )


def _backward_op(match: Match, forward: Op, first: Op) -> Op:
    """Return the gradient; unread gradients of q, k and v are left out.

    Args:
        match: Has the ops of the backward pass.
        forward: The fused op of the forward pass.
        first: The op that the new one replaces.
    """
    q, k, _v, initial, *others = forward.inputs
    kept = forward.outputs[1]
    attributes = dict(forward.attributes)
    if kept != NO_TENSOR:
        q = k = initial = NO_TENSOR
        others = []
        attributes |= _map_of(match, "").attributes
    mapped = _map_of(match, "map_grad")
    weights = match.ops.get("for_weights")
    of_q, of_k, of_v = (match.ops.get(name) for name in ("for_q", "for_k", "for_v"))
    products = [op for op in (of_q, of_k, of_v) if op is not None]
    return Op(
        "attention_grad",
        [
            *(kept, q, k, initial),
            *(weights.inputs if weights else [NO_TENSOR, NO_TENSOR]),
            of_q.inputs[1] if of_q else NO_TENSOR,
            of_k.inputs[0] if of_k else NO_TENSOR,
            of_v.inputs[1] if of_v else NO_TENSOR,
            *others,
            *mapped.others,
        ],
        [NO_TENSOR if op is None else op.outputs[0] for op in (of_q, of_k, of_v)],
        {
            **attributes,
            "num_others": len(others),
            **{f"grad_{name}": value for name, value in mapped.attributes.items()},
        },
        first.phase,
        first.stage,
        products[0].name,
        first.origin,
    )


def _is_written_before(match: Match, op: Op, first: Op) -> bool:
    """Return whether all inputs of a new op exist when the first of the old ones runs."""
    position = match.uses.position
    return all(
        writer.phase != first.phase or position(writer) < position(first)
        for root in match.graph.roots(op.inputs)
        for writer in match.uses.writers(root.id)
    )


_INNER = ("logits", "scores", "weights", "for_weights", "for_logits", "for_scores")

_ATTENTION = Pattern(
    seed=OpPattern(
        "softmax",
        "softmax",
        {0: operand("logits")},
        output="weights",
        where=_is_softmax,
    ),
    others=[
        OpPattern(
            "map",
            "map",
            among=_matrices("scores"),
            output="logits",
            where=_maps_scores,
            optional=True,
        ),
        OpPattern("scores", "matmul", output="scores", where=_is_product_on_top),
        OpPattern("product", "matmul", {0: _matrices("weights")}, where=_is_product),
        OpPattern("for_v", "matmul", {0: _transposed("weights")}, where=_is_product, optional=True),
        OpPattern(
            "softmax_grad",
            "softmax_grad",
            {0: _matrices("for_weights"), 1: _matrices("weights")},
            output="for_logits",
            where=_is_softmax_grad,
            optional=True,
        ),
        OpPattern(
            "for_weights",
            "matmul",
            output="for_weights",
            where=_is_product,
            given="softmax_grad",
        ),
        OpPattern(
            "map_grad",
            "map",
            among=_matrices("for_logits"),
            output="for_scores",
            where=_maps_scores,
            optional=True,
            given="softmax_grad",
        ),
        OpPattern(
            "for_q",
            "matmul",
            {0: _matrices("for_scores")},
            where=_is_product,
            optional=True,
            given="softmax_grad",
        ),
        OpPattern(
            "for_k",
            "matmul",
            {1: _matrices("for_scores")},
            where=_is_product,
            optional=True,
            given="softmax_grad",
        ),
    ],
    inner=_INNER,
    where=_fits,
)

REWRITES = (
    Rewrite(
        "attention",
        "A product, a ``map``, a softmax and another product are one ``attention``; their "
        "gradients are one ``attention_grad``. Scores and probabilities stay in the caches.",
        _ATTENTION,
        _fused,
    ),
)
