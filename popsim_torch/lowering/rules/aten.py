"""All other ATen operators, called through PyTorch's dispatcher on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.fx

from popsim_torch.errors import Error
from popsim_torch.ir import Argument, Attribute, Tensor, TensorArgument, TensorListArgument
from popsim_torch.lowering.emit.builder import Builder, Place, Value
from popsim_torch.lowering.emit.maps import cast
from popsim_torch.lowering.rules.views import with_traced_layout
from popsim_torch.private_torch.operators import OPDEFS, OpOverload, opname, schema_of
from popsim_torch.trace.graph.device import on_cpu_zeros
from popsim_torch.trace.mutating_operators import is_functional_form

# Numbers of torch's enums, as used in operator schemas.
SCALAR_TYPES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.complex64: 9,
    torch.bool: 11,
    torch.bfloat16: 15,
}
MEMORY_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}
_STRIDED = 0
_HINTS: dict[object, str] = {
    torch.complex32: " Convert its operands first: x.float().",
    torch.complex128: (
        " PyTorch computes it in double precision: compute it from real numbers "
        "(torch.view_as_real), or outside of the model."
    ),
}

# On the CPU their auxiliary results have other shapes than in a trace for a device.
_OTHER_SHAPES_ON_CPU = frozenset(
    {
        torch.ops.aten._embedding_bag.default,
        torch.ops.aten._embedding_bag_forward_only.default,
    }
)

# These only move elements: float16 stays as it is.
_MOVES_DATA = frozenset(
    {
        torch.ops.aten.cat.default,
        torch.ops.aten.constant_pad_nd.default,
        torch.ops.aten.embedding.default,
        torch.ops.aten.flip.default,
        torch.ops.aten.gather.default,
        torch.ops.aten.index.Tensor,
        torch.ops.aten.index_select.default,
        torch.ops.aten.roll.default,
        torch.ops.aten.scatter.src,
        torch.ops.aten.scatter.value,
        torch.ops.aten.select_backward.default,
        torch.ops.aten.select_scatter.default,
        torch.ops.aten.slice_backward.default,
        torch.ops.aten.view.dtype,
        torch.ops.aten.view_copy.dtype,
        torch.ops.aten.slice_scatter.default,
    }
)

# PyTorch rounds results of the first two more than once; the others depend on the range of float16.
_COMPUTES_IN_DTYPE = frozenset(
    f"aten::{name}" for name in ("special_xlog1py", "xlogy", "nan_to_num", "nextafter")
)
# These convert operands of other dtypes, and numbers, to a common dtype first.
_CONVERTS_OPERANDS = frozenset(
    f"aten::{name}"
    for name in (
        "add",
        "addcdiv",
        "addcmul",
        "atan2",
        "copysign",
        "div",
        "eq",
        "floor_divide",
        "fmax",
        "fmin",
        "fmod",
        "ge",
        "gt",
        "hypot",
        "le",
        "logaddexp",
        "logaddexp2",
        "lt",
        "maximum",
        "minimum",
        "mul",
        "ne",
        "pow",
        "remainder",
        "rsub",
        "sub",
    )
)

# These find elements by their place in memory, which is that of PyTorch only by chance.
_READS_MEMORY = frozenset(
    {
        torch.ops.aten.as_strided_scatter.default,
        torch.ops.aten.resize.default,
        torch.ops.aten.resize_as.default,
    },
)


# Operators whose out= kernels write only their result, directly into the given memory. Others use
# it for larger temporary values, or compute elsewhere and copy: they would gain nothing.
_WRITES_IN_PLACE = frozenset(
    f"aten::{name}"
    for name in (
        "_log_softmax",
        "_log_softmax_backward_data",
        "_softmax",
        "_softmax_backward_data",
        "amax",
        "amin",
        "argmax",
        "argmin",
        "avg_pool2d",
        "avg_pool2d_backward",
        "cat",
        "cumsum",
        "gather",
        "index_select",
        "max_pool2d_with_indices",
        "max_pool2d_with_indices_backward",
        "mean",
        "native_layer_norm",
        "nll_loss_backward",
        "nll_loss_forward",
        "prod",
        "sum",
    )
)


@functools.cache
def out_overload(target: OpOverload) -> OpOverload | None:
    """Return the overload of an operator that writes to given tensors, if that saves a copy."""
    if schema_of(target).name not in _WRITES_IN_PLACE:
        return None
    packet = target.overloadpacket
    wanted = [(a.name, str(a.type)) for a in schema_of(target).arguments]
    for name in packet.overloads():
        candidate: OpOverload = getattr(packet, name)
        arguments = schema_of(candidate).arguments
        given = [(a.name, str(a.type)) for a in arguments if not a.is_out]
        outs = [a for a in arguments if a.is_out]
        if outs and len(outs) == len(schema_of(target).returns) and given == wanted:
            return candidate
    return None


def unsupported(node: torch.fx.Node) -> str:
    """Return why the device does not support a node's operator; empty if it does.

    Args:
        node: A call of an operator.
    """
    if _conjugate_number(node) is not None:
        return ""
    results = node.meta.get("val")
    for result in results if isinstance(results, (list, tuple)) else [results]:
        if result is not None and (
            not isinstance(result, torch.Tensor) or result.dtype not in SCALAR_TYPES
        ):
            given = getattr(result, "dtype", type(result).__name__)
            hint = _HINTS.get(given, "")
            return f"gives {given}, which the device does not support.{hint}"
    return ""


def _conjugate_number(node: torch.fx.Node) -> complex | None:
    """Return the number that a node conjugates: the gradient of ``x * 2j`` has one."""
    target = node.target
    given = node.args[0] if isinstance(target, OpOverload) and opname(target) == "_conj" else None
    return given.conjugate() if isinstance(given, complex) else None


class _Boxer:
    """Converts a node's arguments to the form that the ``aten`` op needs."""

    def __init__(
        self, builder: Builder, place: Place, operator: OpOverload, *, widen: bool
    ) -> None:
        self._builder = builder
        self._place = place
        self._widen = widen
        self._in_memory_order = operator in _READS_MEMORY
        self.inputs: list[Tensor] = []

    def __call__(self, value: Any) -> Argument:
        if isinstance(value, torch.fx.Node):
            number = _conjugate_number(value)
            return TensorArgument(self._position(value)) if number is None else number
        if isinstance(value, (list, tuple)) and any(
            isinstance(item, torch.fx.Node) for item in value
        ):
            return TensorListArgument(
                tuple(-1 if item is None else self._position(item) for item in value)
            )
        if isinstance(value, (list, tuple)):
            items: list[Any] = [self._plain(item) for item in value]
            has_float = any(isinstance(item, float) for item in items)
            return [float(item) for item in items] if has_float else items
        plain: Argument = self._plain(value)
        return plain

    def computed(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a result of the given dtype is computed."""
        return torch.float32 if self._widen and dtype == torch.float16 else dtype

    def _position(self, node: torch.fx.Node) -> int:
        tensor = self._builder.tensor(node)
        if self._in_memory_order:
            tensor = with_traced_layout(self._builder, node, tensor, self._place)
        if self._widen and tensor.dtype == torch.float16:
            tensor = cast(self._builder, tensor, torch.float32, self._place)
        self.inputs.append(tensor)
        return len(self.inputs) - 1

    def _plain(self, value: Any) -> Any:
        if isinstance(value, torch.dtype) and value in SCALAR_TYPES:
            return SCALAR_TYPES[self.computed(value)]
        if isinstance(value, torch.device):
            return "cpu"
        if isinstance(value, torch.layout):
            return _STRIDED
        if isinstance(value, torch.memory_format):
            return MEMORY_FORMATS[value]
        if value is None or isinstance(value, (bool, int, float, complex, str)):
            return value
        raise Error(
            f"Unsupported ops found in compiled model: {self._place.shown} has an argument of "
            f"type {type(value).__name__} ({value!r}), which the device does not support."
        )


def _bound(node: torch.fx.Node, target: OpOverload) -> list[Any]:
    """Return the node's arguments in the order of the schema, defaults filled in."""
    values = []
    for position, argument in enumerate(a for a in schema_of(target).arguments if not a.is_out):
        if position < len(node.args) and not argument.kwarg_only:
            values.append(node.args[position])
        elif argument.name in node.kwargs:
            values.append(node.kwargs[argument.name])
        else:
            values.append(argument.default_value if argument.has_default_value() else None)
    return values


def lower_aten(
    builder: Builder,
    node: torch.fx.Node,
    place: Place,
    *,
    target: OpOverload | None = None,
    stream: int | None = None,
) -> Value:
    """Add the ``aten`` op for a node.

    Args:
        builder: The graph under construction.
        node: The node; its ``meta["val"]`` has shapes and dtypes.
        place: The place of the op.
        target: The operator to call, if it is not the node's own.
        stream: The random stream, for an operator that draws random numbers. The op runs for every
            micro-batch.

    Raises:
        Error: The device does not support an argument.
    """
    if _conjugate_number(node) is not None:
        return None  # (its readers have the number)
    operator: Any = target or node.target
    boxer = _Boxer(builder, place, operator, widen=_widens(operator, node))
    arguments = [boxer(value) for value in _bound(node, operator)]
    single = isinstance(node.meta.get("val"), torch.Tensor)
    flat = _results(node)
    out = None
    if all(result is not None for result in flat) and not _returns_list(operator):
        out = out_overload(operator)
    if out is None and not single:
        # Only results that are read have to come back. PyTorch's data for the others may even be
        # wrong, for example for a gradient that is not computed.
        read = builder.used_results(node)
        flat = [result if i in read else None for i, result in enumerate(flat)]
    outputs = [None if r is None else builder.value(boxer.computed(r.dtype), r.shape) for r in flat]
    attributes: dict[str, Attribute] = {
        "operator": schema_of(operator).name,
        "overload": schema_of(operator).overload_name,
        "arguments": arguments,
    }
    if out is not None:
        attributes["out"] = schema_of(out).overload_name
    if stream is not None:
        attributes["stream"] = stream
    builder.op(
        "aten", boxer.inputs, outputs, attributes, place=place, fixed_phase=stream is not None
    )
    narrowed = [
        None if tensor is None else cast(builder, tensor, result.dtype, place)
        for tensor, result in zip(outputs, flat, strict=True)
    ]
    return narrowed[0] if single else narrowed


def _widens(operator: OpOverload, node: torch.fx.Node) -> bool:
    """Return whether a node computes float16 in float32, and rounds once, as most do.

    Users' Python code sees the dtype.
    """
    name = schema_of(operator).name
    if name in OPDEFS or is_functional_form(operator):
        return False
    if name in _CONVERTS_OPERANDS and _has_other_operands(node):
        return False
    return operator not in _MOVES_DATA and name not in _COMPUTES_IN_DTYPE


def _has_other_operands(node: torch.fx.Node) -> bool:
    """Return whether a node has numbers, or tensors that are not in float16."""
    traced = (source.meta["val"] for source in node.all_input_nodes)
    has_numbers = any(isinstance(value, (int, float)) for value in node.args)
    return has_numbers or any(one.dtype != torch.float16 for one in traced)


def _results(node: torch.fx.Node) -> list[Any]:
    """Return a tensor with shape and dtype of each result of a node; None for absent results."""
    traced = node.meta.get("val")
    if traced is None:  # a check without results
        return []
    if node.target in _OTHER_SHAPES_ON_CPU:
        values = torch.fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
        return list(on_cpu_zeros(node.target, *values))
    return [traced] if isinstance(traced, torch.Tensor) else list(traced)


def _returns_list(operator: OpOverload) -> bool:
    return any("[]" in str(r.type) or "List" in str(r.type) for r in schema_of(operator).returns)
