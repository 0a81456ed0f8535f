"""Gives each node of a trace its name; ``ir.names`` defines the spelling of names."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from popsim_torch.ir import names
from popsim_torch.private_torch.operators import OpOverload, schema_of
from popsim_torch.trace.graph.bodies import Control, control_of
from popsim_torch.trace.graph.markers import NAMESPACE
from popsim_torch.trace.graph.origin import origin_of

# Operators that return a tensor unchanged, or reserve memory: their results need no name.
_UNNAMED = frozenset(
    {"alias", "detach", "empty", "empty_like", "lift_fresh_copy", "new_empty_strided"}
)

# Type of the device's op for an ATen operator, if it is not the operator's name in CamelCase.
_TYPES = {
    "_log_softmax": "LogSoftmax",
    "_safe_softmax": "Softmax",
    "_softmax": "Softmax",
    "_to_copy": "Cast",
    "_unsafe_view": "Reshape",
    "addmm": "Gemm",
    "adaptive_avg_pool2d": "AveragePool",
    "_adaptive_avg_pool2d": "AveragePool",
    "_adaptive_avg_pool3d": "AveragePool",
    "amax": "ReduceMax",
    "amin": "ReduceMin",
    "argmax": "ArgMax",
    "argmin": "ArgMin",
    "avg_pool2d": "AveragePool",
    "avg_pool3d": "AveragePool",
    "baddbmm": "MatMul",
    "bernoulli": "Dropout",
    "bmm": "MatMul",
    "cat": "Concat",
    "clamp": "Clip",
    "clamp_max": "Clip",
    "clamp_min": "Clip",
    "clone": "Identity",
    "convolution": "Conv",
    "ctc_loss": "Ctc",
    "dot": "MatMul",
    "embedding": "Gather",
    "eq": "Equal",
    "ge": "GreaterOrEqual",
    "gt": "Greater",
    "gru": "GRU",
    "hardtanh": "Clip",
    "host_call": "CPU",
    "index": "Gather",
    "index_select": "Gather",
    "le": "LessOrEqual",
    "lstm": "LSTM",
    "lt": "Less",
    "max": "ReduceMax",
    "max_pool2d_with_indices": "MaxPool",
    "max_pool3d_with_indices": "MaxPool",
    "mean": "ReduceMean",
    "min": "ReduceMin",
    "mm": "MatMul",
    "mv": "MatMul",
    "_native_batch_norm_legit": "BatchNormalization",
    "_native_batch_norm_legit_functional": "BatchNormalization",
    "_native_batch_norm_legit_no_training": "BatchNormalization",
    "native_batch_norm": "BatchNormalization",
    "native_group_norm": "GroupNormalization",
    "native_layer_norm": "GroupNormalization",
    "nll_loss2d_forward": "Nll",
    "nll_loss_forward": "Nll",
    "permute": "Transpose",
    "rnn_relu": "RNN",
    "rnn_tanh": "RNN",
    "rsub": "Sub",
    "scatter": "ScatterReduce",
    "scatter_add": "ScatterReduce",
    "scatter_reduce": "ScatterReduce",
    "select": "Slice",
    "serialized_matmul": "MatMul",
    "sum": "ReduceSum",
    "t": "Transpose",
    "topk": "TopK",
    "view": "Reshape",
}


_LOSS = "IdentityLoss"
# Operators that cut a tensor into pieces: the type of each.
_PIECES = {"split": "Slice", "split_with_sizes": "Slice", "unbind": "Squeeze"}
# Matrix products: the type for a product whose operands have another rank.
_PRODUCTS = {"addmm": "Add", "bmm": "MatMul", "mm": "MatMul", "mv": "MatMul"}
_RESHAPES = frozenset({"view", "_unsafe_view", "reshape", "squeeze"})
_PREPARES = _RESHAPES | {"clone", "expand", "unsqueeze"}

_TRANSPOSED = 6  # argument index of a convolution
_MODE = 7  # argument index of a recurrent layer


def op_type(node: torch.fx.Node) -> str:
    """Return the op type in the names of a node's results, such as ``Gemm`` for ``aten.addmm``."""
    override = origin_of(node).op_type
    if override is not None:
        return override
    name = _operator(node)
    if node.target is torch.ops.aten.convolution.default and node.args[_TRANSPOSED]:
        return "ConvTranspose"
    if name == "recurrent":
        name = str(node.args[_MODE])
    if name not in _TYPES:
        name = name.removesuffix("_copy").removesuffix("_")
    return _TYPES.get(name) or "".join(part.capitalize() for part in name.split("_"))


class NameTable:
    """Gives every result of a graph its name, and finds a result by its name.

    Names have the form ``<scope>/<OpType>:<output>``; if a name is taken, the next ones end in
    ``/1``, ``/2``, ...
    """

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}
        self.of_node: dict[torch.fx.Node, str] = {}

    def unique(self, name: str) -> str:
        """Return ``name``, or its first free form, and reserve it."""
        count = self._taken.get(name, -1) + 1
        self._taken[name] = count
        if count == 0:
            return name
        candidate = names.numbered(name, count)
        if candidate in self._taken:
            return self.unique(name)
        self._taken[candidate] = 0
        return candidate

    def set(self, node: torch.fx.Node, name: str) -> None:
        """Name a node's result."""
        self.of_node[node] = self.unique(name)

    def loss_name(self, node: torch.fx.Node) -> str:
        """Return the name of a loss in its role as loss: the device has an op that marks it."""
        name = self.of_node.get(node)
        if name is not None and op_type(node) == _LOSS:
            return name
        return self.unique(names.result(origin_of(node).scope, _LOSS, 0))

    def name_forward(self, graph: torch.fx.Graph, controls: Sequence[Control] = ()) -> None:
        """Name the results of all forward nodes in order, also those of bodies."""
        products = _wrapped_products(graph)
        for node in graph.nodes:
            if node.op != "call_function" or origin_of(node).backward:
                continue
            control = control_of(node, controls)
            for body in () if control is None else control.bodies:
                self.name_forward(body.graph, controls)
            if node in products:
                product = products[node]
                if product is not None:
                    self.set(node, names.result(origin_of(node).scope, product, 0))
                continue
            if node.target is operator.getitem:
                producer, index = node.args
                owner = control_of(producer, controls)
                named = _is_result(producer, index) if owner is None else index < owner.num_named
                if named:
                    self.set(node, _forward_name(producer, int(index)))
            elif isinstance(node.meta.get("val"), torch.Tensor) and _is_named(node):
                self.set(node, _forward_name(node, 0))


def _wrapped_products(graph: torch.fx.Graph) -> dict[torch.fx.Node, str | None]:
    """Return the nodes that are one product of the user, written with matrices.

    PyTorch reshapes operands of higher rank to matrices, and reshapes the product back, all in one
    call. The last of these nodes is the user's product, and has its type; the others have None.
    """
    found: dict[torch.fx.Node, str | None] = {}
    for product in graph.nodes:
        if _operator(product) not in _PRODUCTS or origin_of(product).backward:
            continue
        result = _reshaped_back(product)
        if result is None:
            continue
        found[product] = None
        for operand in product.all_input_nodes:
            while _is_step_of(operand, product):
                found[operand] = None
                (operand,) = operand.all_input_nodes
        found[result] = _PRODUCTS[_operator(product)]
    return found


def _reshaped_back(product: torch.fx.Node) -> torch.fx.Node | None:
    """Return the reshaped product, if the same call reshapes it."""
    found = (user for user in product.users if _view(user) in _RESHAPES)
    return next((user for user in found if _of_one_call(user, product)), None)


def _is_step_of(operand: torch.fx.Node, product: torch.fx.Node) -> bool:
    """Return whether a node prepares an operand of a product in the same call."""
    return (
        _view(operand) in _PREPARES and _of_one_call(operand, product) and len(operand.users) == 1
    )


def _operator(node: torch.fx.Node) -> str:
    """Return the name of a node's operator; empty for a node without operator."""
    if not isinstance(node.target, OpOverload):
        return ""
    return schema_of(node.target).name.split("::")[-1]


def _view(node: torch.fx.Node) -> str:
    """Return the name of a node's operator, with the copies of views named as views."""
    return _operator(node).removesuffix("_copy")


def _of_one_call(node: torch.fx.Node, other: torch.fx.Node) -> bool:
    call = origin_of(node).call
    return call != 0 and call == origin_of(other).call


def _is_named(node: torch.fx.Node) -> bool:
    if not isinstance(node.target, OpOverload) or schema_of(node.target).is_mutable:
        return False
    namespace, name = schema_of(node.target).name.split("::")
    return name != "mark" if namespace == NAMESPACE else name not in _UNNAMED


def _is_result(producer: torch.fx.Node, index: int) -> bool:
    """Return whether forward gets a result; host calls have one more for their gradients."""
    if _operator(producer) != "host_call":
        return True
    differentiable: Any = producer.args[-1]
    return index < len(differentiable)


def _forward_name(node: torch.fx.Node, output: int) -> str:
    piece = _PIECES.get(_view(node))
    if piece is not None:  # the device has a separate op for each piece
        return names.result(origin_of(node).scope, piece, 0)
    return names.result(origin_of(node).scope, op_type(node), output)
