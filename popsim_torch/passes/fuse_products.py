"""Lets matrix products do what follows them, while their result is in registers or caches.

* A ``map`` that adds a bias per column joins the product it reads.
* Products of two matrices take in relu and the mask of relu's gradient, and the update by plain
  SGD of the weight that they are the gradient of.

Only where nobody else reads what is then no longer computed. Names of such tensors stay in the
graph.
"""

from __future__ import annotations

import torch

from popsim_torch._native import Fusion, product_can_fuse
from popsim_torch.dtypes import dtype_name
from popsim_torch.ir import Graph, Op, Tensor, TensorKind, Uses
from popsim_torch.ir.graph import NO_TENSOR
from popsim_torch.ir.map_code import MapCode, MapValue

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _relu(code: MapCode, x: MapValue) -> MapValue:
    return code("relu", x)


def _sum(code: MapCode, a: MapValue, b: MapValue) -> MapValue:
    return code("add", a, b)


def _masked(code: MapCode, gradient: MapValue, mask: MapValue) -> MapValue:
    return code("where", code("le", mask, 0.0), 0.0, gradient)


def fuse_products(graph: Graph) -> int:
    """Fuse what follows matrix products into them, in place.

    Args:
        graph: Complete, returns included: a tensor that is copied to the host has a reader more.

    Returns:
        The number of ops that became part of a product, or that a product became part of.
    """
    return _ProductFusion(graph).run()


class _ProductFusion:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._uses = Uses(graph)
        self._products: dict[int, Op] = {}  # by the tensor they write
        self._gone: set[int] = set()

    def run(self) -> int:
        for op in self._graph.ops:
            if op.kind == "map":
                self._join_map(op)
            elif op.kind == "sgd_update":
                self._join_update(op)
            if op.kind == "matmul" and not self._uses.reads_changed(op):
                self._products[op.outputs[0]] = op
        self._graph.ops = [op for op in self._graph.ops if id(op) not in self._gone]
        return len(self._gone)

    def _tensor(self, tensor_id: int) -> Tensor:
        return self._graph.tensors[tensor_id]

    def _root(self, tensor_id: int) -> Tensor:
        return self._graph.root_of(tensor_id)

    def _product_of(self, op: Op, tensor_id: int) -> Op | None:
        """Return the product that writes what ``op`` alone reads as ``tensor_id``, all of it."""
        tensor, root = self._tensor(tensor_id), self._root(tensor_id)
        product = self._products.get(root.id)
        alone = self._uses.only_reader(root.id) is op
        return product if alone and tensor.covers(root) else None

    def _join_map(self, op: Op) -> None:
        if len(op.outputs) != 1:
            return
        out = self._tensor(op.outputs[0])
        for tensor_id in op.inputs:
            product = self._product_of(op, tensor_id)
            if (
                product is None
                or self._root(tensor_id).kind != TensorKind.VALUE
                or (product.phase, product.stage) != (op.phase, op.stage)
                or out.kind != TensorKind.VALUE
                or out.dtype != self._tensor(tensor_id).dtype
                or out.shape != self._tensor(tensor_id).shape
                or "activation" in product.attributes
                or len(product.inputs) > 3
            ):
                continue
            if self._with_code(product, MapCode.of(op), tensor_id):
                self._replace(op, product)
                return

    def _with_code(self, product: Op, code: MapCode, result: int) -> bool:
        """Let a product do what a ``map`` does to its result; say whether it can."""
        if code.computes(_relu, result):
            return self._with_relu(product)
        if len(code.inputs) != 2:
            return False
        other = code.inputs[1 - code.inputs.index(result)]
        if code.computes(_sum, result, other) or code.computes(_sum, other, result):
            return self._with_bias(product, other)
        return code.computes(_masked, result, other) and self._with_mask(product, other)

    def _with_relu(self, product: Op) -> bool:
        if not self._can_fuse(Fusion.RELU, product):
            return False
        product.attributes["activation"] = "relu"
        return True

    def _with_bias(self, product: Op, bias_id: int) -> bool:
        bias = self._tensor(bias_id)
        columns = self._tensor(product.outputs[0]).shape[-1]
        if (
            bias.dtype != torch.float32
            or bias.shape != (columns,)
            or len(product.inputs) != 2
            or self._root(bias_id).kind != TensorKind.VARIABLE
        ):
            return False
        product.inputs.append(bias_id)
        return True

    def _with_mask(self, product: Op, mask_id: int) -> bool:
        mask, out = self._tensor(mask_id), self._tensor(product.outputs[0])
        if (
            mask.dtype != torch.float32
            or not mask.is_contiguous
            or mask.numel != out.numel
            or not self._can_fuse(Fusion.MASK, product)
        ):
            return False
        seen = self._graph.add_view(mask, out.shape, out.strides, mask.offset)
        inputs = [*product.inputs, *[NO_TENSOR] * (3 - len(product.inputs)), seen.id]
        product.inputs[:] = inputs
        return True

    def _replace(self, op: Op, product: Op) -> None:
        """Put the product in the place of ``op``, whose result it now computes."""
        out, seen = self._tensor(op.outputs[0]), self._tensor(product.outputs[0])
        # The product sees its result as a matrix, its reader perhaps with more axes.
        if out.shape != seen.shape:
            out = self._graph.add_view(out, seen.shape, seen.strides, 0)
        op.kind, op.inputs, op.outputs = product.kind, product.inputs, [out.id]
        op.attributes = product.attributes
        self._gone.add(id(product))

    def _join_update(self, op: Op) -> None:
        weight_id, gradient_id, *scalars = op.inputs
        product = self._product_of(op, gradient_id)
        weight, gradient = self._tensor(weight_id), self._tensor(gradient_id)
        if (
            product is None
            or len(product.inputs) != 2
            or len(scalars) != 2
            or product.attributes
            or weight.shape != self._tensor(product.outputs[0]).shape
            or gradient.shape != weight.shape
            or not self._can_fuse(Fusion.UPDATE, product)
            or not self._pays(product)
        ):
            return
        kept = self._root(gradient_id)
        if kept.kind != TensorKind.VALUE:  # the host reads it
            whole = self._graph.add_view(kept, weight.shape, weight.strides, 0)
            op.outputs = [*op.outputs, whole.id]
        op.kind = "sgd_product_update"
        op.inputs = [weight_id, *product.inputs, *scalars]
        self._gone.add(id(product))

    def _can_fuse(self, what: Fusion, product: Op) -> bool:
        """Whether ``csrc/dense`` has code for the product together with what follows it."""
        a, b = (self._tensor(i) for i in product.inputs[:2])
        if len(a.shape) != 2 or len(b.shape) != 2 or a.dtype not in _DTYPES:
            return False
        if what != Fusion.RELU and a.dtype != torch.float32:
            return False
        return product_can_fuse(what, dtype_name(a.dtype), a.shape, a.strides, b.shape, b.strides)

    def _pays(self, product: Op) -> bool:
        """Whether keeping the operands until the update takes less memory than the gradient."""
        kept = [self._root(i) for i in product.inputs[:2]]
        if any(t.kind not in (TensorKind.VALUE, TensorKind.INPUT) for t in kept):
            return False
        values = sum(t.numel for t in kept if t.kind == TensorKind.VALUE)
        return values <= self._tensor(product.outputs[0]).numel
