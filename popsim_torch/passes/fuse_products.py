"""Fuses the ops after a matrix product into it, while its result is in registers or caches.

* A ``map`` that adds a bias per column is fused into the product that it reads.
* Relu, the mask of relu's gradient, and the plain SGD update of a weight are fused into the product
  of two matrices that computes their input.

The pass requires that no other op reads the values that are no longer computed. Names of such
tensors stay in the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from popsim_torch._native import Fusion, product_can_fuse
from popsim_torch.dtypes import dtype_name
from popsim_torch.ir import Graph, Op, TensorKind
from popsim_torch.ir.graph import NO_TENSOR
from popsim_torch.ir.map_code import Formula, MapCode, MapValue
from popsim_torch.passes.patterns import Match, OpPattern, Pattern, Rewrite, rewrite, whole

__all__ = ["REWRITES", "fuse_products"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def fuse_products(graph: Graph) -> int:
    """Fuse ops after matrix products into them, in place; see ``rewrite``."""
    return rewrite(graph, REWRITES)


def _relu(code: MapCode, x: MapValue) -> MapValue:
    return code("relu", x)


def _sum(code: MapCode, a: MapValue, b: MapValue) -> MapValue:
    return code("add", a, b)


def _masked(code: MapCode, gradient: MapValue, mask: MapValue) -> MapValue:
    return code("where", code("le", mask, 0.0), 0.0, gradient)


def _stays(match: Match, product: Op) -> bool:
    """Return whether a product may run later than it does."""
    return not match.uses.reads_changed(product)


# --- A map after a product ---


def _map_fits(match: Match) -> bool:
    product, op = match.ops["product"], match.ops["map"]
    seen, out = match.tensor(_seen(match)), match.tensor(op.outputs[0])
    return (
        len(op.outputs) == 1
        and out.kind == TensorKind.VALUE
        and (out.dtype, out.shape) == (seen.dtype, seen.shape)
        and match.run_together("product", "map")
        and "activation" not in product.attributes
        and len(product.inputs) <= 3
    )


def _seen(match: Match) -> int:
    """Return the product's result as the ``map`` reads it."""
    return match.ops["map"].inputs[match.positions["map"]]


def _other(match: Match, *formulas: Formula) -> int | None:
    """Return the second operand of a ``map`` that computes one of these formulas."""
    result, code = _seen(match), MapCode.of(match.ops["map"])
    if len(code.inputs) != 2:
        return None
    other = code.inputs[1 - code.inputs.index(result)]
    return other if any(code.computes(formula, result, other) for formula in formulas) else None


def _in_place_of_map(match: Match, product: Op) -> Mapping[str, Op]:
    """Return the product in the place of the ``map``, whose result it now computes."""
    op, graph = match.ops["map"], match.graph
    out, seen = match.tensor(op.outputs[0]), match.tensor(product.outputs[0])
    # The product has its result as a matrix, its reader maybe with more axes.
    if out.shape != seen.shape:
        out = graph.add_view(out, seen.shape, seen.strides, 0)
    joined = replace(
        op,
        kind=product.kind,
        inputs=list(product.inputs),
        outputs=[out.id],
        attributes=dict(product.attributes),
    )
    return {"map": joined}


def _with_relu(match: Match) -> Mapping[str, Op] | None:
    product = match.ops["product"]
    code = MapCode.of(match.ops["map"])
    if not code.computes(_relu, _seen(match)) or not _can_fuse(match, Fusion.RELU, product):
        return None
    attributes = {**product.attributes, "activation": "relu"}
    return _in_place_of_map(match, replace(product, attributes=attributes))


def _with_bias(match: Match) -> Mapping[str, Op] | None:
    product = match.ops["product"]
    bias_id = _other(match, _sum, lambda code, a, b: _sum(code, b, a))
    if bias_id is None:
        return None
    bias, columns = match.tensor(bias_id), match.tensor(product.outputs[0]).shape[-1]
    if (
        bias.dtype != torch.float32
        or bias.shape != (columns,)
        or len(product.inputs) != 2
        or match.root(bias_id).kind != TensorKind.VARIABLE
    ):
        return None
    return _in_place_of_map(match, replace(product, inputs=[*product.inputs, bias_id]))


def _with_mask(match: Match) -> Mapping[str, Op] | None:
    product = match.ops["product"]
    mask_id = _other(match, _masked)
    if mask_id is None:
        return None
    mask, out = match.tensor(mask_id), match.tensor(product.outputs[0])
    if (
        mask.dtype != torch.float32
        or not mask.is_contiguous
        or mask.numel != out.numel
        or not _can_fuse(match, Fusion.MASK, product)
    ):
        return None
    seen = match.graph.add_view(mask, out.shape, out.strides, mask.offset)
    inputs = [*product.inputs, *[NO_TENSOR] * (3 - len(product.inputs)), seen.id]
    return _in_place_of_map(match, replace(product, inputs=inputs))


# --- An update after a product ---


def _update_fits(match: Match) -> bool:
    product, op = match.ops["product"], match.ops["update"]
    weight, gradient = (match.tensor(i) for i in op.inputs[:2])
    return (
        match.uses.only_reader(gradient.id) is op
        and len(product.inputs) == 2
        and len(op.inputs) == 4
        and not product.attributes.keys() - {"precision"}
        and weight.shape == match.tensor(product.outputs[0]).shape
        and gradient.shape == weight.shape
        and _can_fuse(match, Fusion.UPDATE, product)
        and _pays(match, product)
    )


def _with_update(match: Match) -> Mapping[str, Op]:
    product, op = match.ops["product"], match.ops["update"]
    weight_id, gradient_id, *scalars = op.inputs
    kept, outputs = match.root(gradient_id), list(op.outputs)
    if kept.kind != TensorKind.VALUE:  # the host reads it
        weight = match.tensor(weight_id)
        outputs.append(match.graph.add_view(kept, weight.shape, weight.strides, 0).id)
    inputs = [weight_id, *product.inputs, *scalars]
    joined = replace(
        op,
        kind="sgd_product_update",
        inputs=inputs,
        outputs=outputs,
        attributes=dict(product.attributes),
    )
    return {"update": joined}


# --- Conditions of both cases ---


def _can_fuse(match: Match, what: Fusion, product: Op) -> bool:
    """Return whether ``csrc/dense`` has code for the product fused with the next op."""
    a, b = (match.tensor(i) for i in product.inputs[:2])
    if len(a.shape) != 2 or len(b.shape) != 2 or a.dtype not in _DTYPES:
        return False
    if what != Fusion.RELU and a.dtype != torch.float32:
        return False
    return product_can_fuse(what, dtype_name(a.dtype), a.shape, a.strides, b.shape, b.strides)


def _pays(match: Match, product: Op) -> bool:
    """Return whether keeping the operands until the update takes less memory than the gradient."""
    kept = [match.root(i) for i in product.inputs[:2]]
    if any(t.kind not in (TensorKind.VALUE, TensorKind.INPUT) for t in kept):
        return False
    values = sum(t.numel for t in kept if t.kind == TensorKind.VALUE)
    return values <= match.tensor(product.outputs[0]).numel


_MAP_BEHIND_PRODUCT = Pattern(
    seed=OpPattern("map", "map", among=whole("result")),
    others=[OpPattern("product", "matmul", output="result", where=_stays)],
    inner=["result"],
    where=_map_fits,
)
_UPDATE_BEHIND_PRODUCT = Pattern(
    seed=OpPattern("update", "sgd_update", {1: whole("gradient")}),
    others=[OpPattern("product", "matmul", output="gradient", where=_stays)],
    inner=[],
    where=_update_fits,
)

REWRITES = (
    Rewrite(
        "matmul with relu",
        "A product of two matrices takes in the relu after it.",
        _MAP_BEHIND_PRODUCT,
        _with_relu,
    ),
    Rewrite(
        "matmul with bias",
        "A product takes in the addition of a variable with an element per column.",
        _MAP_BEHIND_PRODUCT,
        _with_bias,
    ),
    Rewrite(
        "matmul with mask",
        "A product of two matrices takes in the mask of relu's gradient.",
        _MAP_BEHIND_PRODUCT,
        _with_mask,
    ),
    Rewrite(
        "sgd_product_update",
        "Plain SGD updates a weight while the product computes its gradient, which then need not "
        "exist, where that takes less memory.",
        _UPDATE_BEHIND_PRODUCT,
        _with_update,
    ),
)
