"""Joins the ops of attention, so that scores and probabilities stay in the caches.

A product, a ``map`` (scale, mask), a softmax and another product become one ``attention``. In
training the two gradients of the products, that of the softmax and that of the ``map`` become one
``attention_grad``, which computes the probabilities again instead of reading them, unless they are
few.

Only where nobody else reads what is then no longer written, and where all ops belong to one phase
and stage. Values stay the same to the last bit: both ops compute and round as the separate ones.
Names of tensors that are no longer computed stay in the graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from popsim_torch._native import min_cut_work
from popsim_torch.ir import Graph, Op, Phase, Tensor, TensorKind, Uses
from popsim_torch.ir.graph import NO_TENSOR
from popsim_torch.ir.map_code import MapCode

_MAX_KEPT = 1 << 20
"""Most probabilities, of all heads, that are kept for the gradient. Computing them again costs up
to 3% of a training step of an encoder layer with 64 to 256 positions. With 512 and more the fused
ops are 5 to 10% faster than the separate ones even so, and the arena is a fifth to a half of
theirs. Measured with 8 to 64 heads of width 64."""

_DTYPES = (torch.float16, torch.float32)


def fuse_attention(graph: Graph) -> int:
    """Fuse the ops of attention, in place.

    Args:
        graph: Complete, returns included: a tensor that is copied to the host has a reader more.

    Returns:
        The number of ops that are gone.
    """
    return _AttentionFusion(graph).run()


class _NoMatch(Exception):
    """The ops around a softmax are not those of attention."""


def _require(condition: bool) -> None:
    if not condition:
        raise _NoMatch


@dataclass(frozen=True)
class _Scores:
    """Shape and type of the matrices between the products."""

    batch: int
    rows: int
    columns: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Map:
    """A ``map`` of scores, as attributes of the fused op: value 0 is the scores."""

    others: list[int]
    attributes: dict[str, Any]


@dataclass(frozen=True)
class _Forward:
    """``product`` is the one with the values."""

    scores: Op
    map: Op | None
    softmax: Op
    product: Op


@dataclass(frozen=True)
class _Backward:
    """The gradient of the probabilities, then those of q, k and v; None for what nobody reads."""

    weights: Op | None
    softmax: Op | None
    map: Op | None
    q: Op | None
    k: Op | None
    v: Op | None

    @property
    def ops(self) -> list[Op]:
        found = (self.weights, self.softmax, self.map, self.q, self.k, self.v)
        return [op for op in found if op is not None]


class _AttentionFusion:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._uses = Uses(graph)

    def run(self) -> int:
        before = len(self._graph.ops)
        replaced: dict[int, Op | None] = {}  # by identity; None: gone
        for op in self._graph.ops:
            if op.kind != "softmax":
                continue
            try:
                replaced |= self._fuse(op)
            except _NoMatch:
                continue
        kept = (replaced.get(id(op), op) for op in self._graph.ops)
        self._graph.ops = [op for op in kept if op is not None]
        return before - len(self._graph.ops)

    def _fuse(self, softmax: Op) -> dict[int, Op | None]:
        """Return what becomes of the ops around a softmax."""
        _require(not softmax.attributes["log"])
        shape = self._tensor(softmax.outputs[0]).shape
        _require(len(shape) >= 3 and softmax.attributes["axis"] == len(shape) - 1)
        dtype = self._tensor(softmax.outputs[0]).dtype
        scores = _Scores(math.prod(shape[:-2]), shape[-2], shape[-1], dtype)
        _require(scores.batch > 1 and dtype in _DTYPES)
        forward = self._match_forward(softmax, scores)
        backward = self._match_backward(forward, scores)
        size = scores.batch * scores.rows * scores.columns
        kept = bool(backward.ops) and size <= _MAX_KEPT
        fused = self._forward_op(forward, scores, keep=kept)
        of_forward = [forward.scores, forward.map, forward.softmax, forward.product]
        gone: dict[int, Op | None] = {id(op): None for op in of_forward if op is not None}
        gone[id(forward.product)] = fused
        if backward.ops:
            gradient = self._backward_op(fused, backward, scores)
            gone |= {id(op): None for op in backward.ops}
            gone[id(self._first(backward.ops))] = gradient
        return gone

    # --- Finding the ops ---

    def _match_forward(self, softmax: Op, scores: _Scores) -> _Forward:
        logits = softmax.inputs[0]
        maker = self._maker_of(logits, softmax, scores)
        scaling = None
        if maker.kind == "map":
            scaling = maker
            maker = self._scores_of_map(scaling, scores)
        self._require_product(maker, plus=True)
        product = None
        for reader in self._uses.readers(softmax.outputs[0]):
            if reader.kind == "matmul" and self._is_matrix(reader.inputs[0], softmax, scores):
                _require(product is None)
                product = reader
        _require(product is not None)
        assert product is not None
        self._require_product(product)
        # In the backward pass are those that are computed again (passes/recompute.py).
        self._require_together([maker, scaling, softmax, product], softmax.phase)
        depth = self._tensor(maker.inputs[0]).shape[-1]
        width = self._tensor(product.inputs[1]).shape[-1]
        # Smaller ones, in batches, have other sums.
        _require(scores.rows * scores.columns * min(depth, width) >= min_cut_work())
        return _Forward(maker, scaling, softmax, product)

    def _match_backward(self, forward: _Forward, scores: _Scores) -> _Backward:
        """Find all other readers of the probabilities, and what computes and reads theirs."""
        softmax_grad = for_v = None
        for reader in self._uses.readers(forward.softmax.outputs[0]):
            if reader is forward.product:
                continue
            if reader.kind == "softmax_grad" and softmax_grad is None:
                softmax_grad = reader
            else:
                _require(reader.kind == "matmul" and for_v is None)
                self._require_product(reader)
                weights = self._tensor(reader.inputs[0])
                _require(self._is_transposed(weights, scores))
                for_v = reader
        if softmax_grad is None:
            backward = _Backward(None, None, None, None, None, for_v)
        else:
            backward = self._match_gradient(softmax_grad, for_v, scores)
        if backward.ops:
            self._require_together(backward.ops, Phase.BACKWARD)
            if forward.product.phase == Phase.BACKWARD:
                first = self._uses.position(self._first(backward.ops))
                _require(self._uses.position(forward.product) < first)
        return backward

    def _match_gradient(self, softmax: Op, for_v: Op | None, scores: _Scores) -> _Backward:
        gradient, weights = softmax.inputs
        _require(not softmax.attributes["log"] and self._is_whole(weights, scores))
        _require(softmax.attributes["axis"] == len(self._tensor(weights).shape) - 1)
        above = self._maker_of(gradient, softmax, scores)
        self._require_product(above)
        last, scaling = softmax, None
        readers = self._uses.readers(softmax.outputs[0])
        if len(readers) == 1 and readers[0].kind == "map":
            scaling = last = readers[0]
            _require(self._scores_of_map(scaling, scores) is softmax)
            readers = self._uses.readers(scaling.outputs[0])
        for_q = for_k = None
        self._require_inner(last.outputs[0], scores)
        for reader in readers:
            self._require_product(reader)
            if self._is_matrix(reader.inputs[0], last, scores):
                _require(for_q is None)
                for_q = reader
            else:
                _require(for_k is None and self._is_matrix(reader.inputs[1], last, scores))
                for_k = reader
        _require(for_q is not None or for_k is not None)
        return _Backward(above, softmax, scaling, for_q, for_k, for_v)

    def _maker_of(self, tensor_id: int, reader: Op, scores: _Scores) -> Op:
        """Return the op that writes what ``reader`` alone reads, all of it."""
        self._require_inner(tensor_id, scores)
        alone = self._uses.only_reader(tensor_id) is reader
        _require(alone and self._is_whole(tensor_id, scores))
        return self._uses.writers(tensor_id)[0]

    def _scores_of_map(self, op: Op, scores: _Scores) -> Op:
        """Return the op whose result a ``map`` of scores alone reads."""
        _require(op.kind == "map" and len(op.outputs) == 1)
        self._require_inner(op.outputs[0], scores)
        _require(self._is_whole(op.outputs[0], scores))
        return self._maker_of(op.inputs[self._scores_position(op, scores)], op, scores)

    def _scores_position(self, op: Op, scores: _Scores) -> int:
        """Return which input of a ``map`` are the scores, a product or a softmax's gradient."""
        found = [
            position
            for position, tensor_id in enumerate(op.inputs)
            if self._kind_of_maker(tensor_id) in ("matmul", "softmax_grad")
            and self._is_whole(tensor_id, scores)
        ]
        _require(len(found) == 1)
        return found[0]

    # --- Conditions ---

    def _require_inner(self, tensor_id: int, scores: _Scores) -> None:
        """The tensor belongs to its one writer and its readers."""
        root = self._graph.root_of(tensor_id)
        _require(root.kind == TensorKind.VALUE and len(self._uses.writers(root.id)) == 1)
        _require(root.dtype == scores.dtype)

    def _require_product(self, op: Op, *, plus: bool = False) -> None:
        """The op multiplies batches of matrices, perhaps on top of something."""
        _require(op.kind == "matmul" and len(op.inputs) <= (3 if plus else 2))
        _require("activation" not in op.attributes and "partials" not in op.attributes)
        _require(all(op.attributes.get(name, 1.0) == 1.0 for name in ("alpha", "beta")))
        for tensor_id in op.inputs[:2]:
            tensor = self._tensor(tensor_id)
            _require(len(tensor.shape) == 3 and tensor.shape[0] > 1 and tensor.strides[0] != 0)

    def _require_together(self, ops: Sequence[Op | None], phase: Phase) -> None:
        """All ops run in one place, and what they read does not change meanwhile or later."""
        present = [op for op in ops if op is not None]
        _require(all(op.phase == phase and op.stage == present[0].stage for op in present))
        for op in present:
            _require(all(map(self._is_fixed, self._graph.roots(op.inputs))))

    def _is_fixed(self, root: Tensor) -> bool:
        writers = self._uses.writers(root.id)
        if root.kind == TensorKind.VARIABLE:
            return all(op.phase in (Phase.SETUP, Phase.UPDATE) for op in writers)
        return len(writers) <= 1

    def _is_whole(self, tensor_id: int, scores: _Scores) -> bool:
        tensor = self._tensor(tensor_id)
        matrices = (scores.batch, scores.rows, scores.columns)
        whole = (math.prod(tensor.shape[:-2]), *tensor.shape[-2:]) == matrices
        return whole and tensor.covers(self._graph.root_of(tensor_id))

    def _is_matrix(self, tensor_id: int, writer: Op, scores: _Scores) -> bool:
        """Whether an operand of a product is what ``writer`` writes."""
        same = self._graph.root_of(tensor_id) is self._graph.root_of(writer.outputs[0])
        return same and self._is_whole(tensor_id, scores)

    def _is_transposed(self, tensor: Tensor, scores: _Scores) -> bool:
        size = scores.rows * scores.columns
        return (
            tensor.shape == (scores.batch, scores.columns, scores.rows)
            and tensor.strides == (size, 1, scores.columns)
            and tensor.offset == 0
        )

    # --- Writing the new ones ---

    def _forward_op(self, forward: _Forward, scores: _Scores, *, keep: bool) -> Op:
        product = forward.product
        mapped = self._map_of(forward.map, scores)
        q, k, *initial = forward.scores.inputs
        return Op(
            "attention",
            [q, k, product.inputs[1], *(initial or [NO_TENSOR]), *mapped.others],
            [*product.outputs, product.inputs[0] if keep else NO_TENSOR],
            {**mapped.attributes, "safe": bool(forward.softmax.attributes.get("safe", False))},
            product.phase,
            product.stage,
            product.name,
            product.origin,
        )

    def _backward_op(self, forward: Op, backward: _Backward, scores: _Scores) -> Op:
        q, k, _v, initial, *others = forward.inputs
        kept = forward.outputs[1]
        attributes = dict(forward.attributes)
        if kept != NO_TENSOR:
            q = k = initial = NO_TENSOR
            others = []
            attributes |= self._map_of(None, scores).attributes
        mapped = self._map_of(backward.map, scores)
        first = self._first(backward.ops)
        results = (backward.q, backward.k, backward.v)
        op = Op(
            "attention_grad",
            [
                *(kept, q, k, initial),
                *(backward.weights.inputs if backward.weights else [NO_TENSOR, NO_TENSOR]),
                backward.q.inputs[1] if backward.q else NO_TENSOR,
                backward.k.inputs[0] if backward.k else NO_TENSOR,
                backward.v.inputs[1] if backward.v else NO_TENSOR,
                *others,
                *mapped.others,
            ],
            [NO_TENSOR if product is None else product.outputs[0] for product in results],
            {
                **attributes,
                "num_others": len(others),
                **{f"grad_{name}": value for name, value in mapped.attributes.items()},
            },
            first.phase,
            first.stage,
            next(product.name for product in results if product is not None),
            first.origin,
        )
        self._require_written_before(first, op)
        return op

    def _require_written_before(self, first: Op, op: Op) -> None:
        """All that the new op reads is there when the first of the old ones runs."""
        position = self._uses.position
        for root in self._graph.roots(op.inputs):
            for writer in self._uses.writers(root.id):
                _require(writer.phase != first.phase or position(writer) < position(first))

    def _map_of(self, op: Op | None, scores: _Scores) -> _Map:
        code, shape = MapCode(), [scores.batch, scores.rows, scores.columns]
        if op is None:
            code.results = [code.input(NO_TENSOR)]  # the scores, as they are
        else:
            code, shape = MapCode.of(op), list(self._tensor(op.outputs[0]).shape)
            code.put_first(op.inputs[self._scores_position(op, scores)])
        attributes: Any = code.attributes()
        (result,) = attributes.pop("results")
        return _Map(code.inputs[1:], {**attributes, "result": result, "shape": shape})

    # --- The graph ---

    def _tensor(self, tensor_id: int) -> Tensor:
        return self._graph.tensors[tensor_id]

    def _kind_of_maker(self, tensor_id: int) -> str:
        writers = self._uses.writers(tensor_id)
        return writers[0].kind if writers else ""

    def _first(self, ops: list[Op]) -> Op:
        return min(ops, key=self._uses.position)
