"""Lowers the formula of an update: the graph of an optimizer's own step.

Arithmetic on single numbers becomes ``numbers`` ops, which compute in float64 as Python does.
Elementwise operators on tensors with the shape of the parameter become one ``map`` op, which writes
the new weight and states in place. Other operators become ops as in forward; they divide the chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from popsim_torch.dtypes import dtype_name
from popsim_torch.errors import Error, InternalError
from popsim_torch.ir import Attribute, Tensor, TensorKind
from popsim_torch.ir.map_code import MapCode, MapValue
from popsim_torch.lowering.emit.builder import Builder, Place, Value
from popsim_torch.lowering.emit.maps import emit_map
from popsim_torch.lowering.rules.aten import unsupported
from popsim_torch.lowering.rules.creation import is_random
from popsim_torch.lowering.rules.elementwise import FORMULAS, is_map
from popsim_torch.lowering.rules.table import RULES
from popsim_torch.optim.formula import UpdateFormula
from popsim_torch.private_torch.operators import OpOverload, schema_of

__all__ = ["FormulaLowering", "is_elementwise"]

aten = torch.ops.aten
_CASTS = (aten._to_copy.default, aten.copy.default)
# (the number is the last argument)
_MAKERS = (aten.full.default, aten.full_like.default, aten.scalar_tensor.default)
_FILLED = {
    aten.zeros_like.default: 0.0,
    aten.ones_like.default: 1.0,
    aten.new_zeros.default: 0.0,
    aten.zeros.default: 0.0,
    aten.ones.default: 1.0,
}
_FLOATING = (torch.float16, torch.float32)
# Those of ``numbers`` ops. PyTorch's kernels round others after each operator.
_OF_NUMBERS = frozenset({torch.float32, torch.float64, torch.int32, torch.int64, torch.bool})
# The device has no tensors of float64, only single numbers.
_HELD = {torch.float64: torch.float32}


def is_elementwise(node: torch.fx.Node) -> bool:
    """Return whether a node is arithmetic on numbers, or on elements of tensors of one shape."""
    result = node.meta.get("val")
    if node.op != "call_function" or not isinstance(result, torch.Tensor):
        return False
    return _is_number(node) or _is_element(node, tuple(result.shape))


def _is_number(node: torch.fx.Node) -> bool:
    """Return whether a node is arithmetic on single numbers."""
    result: torch.Tensor = node.meta["val"]
    values = [result, *(source.meta["val"] for source in node.all_input_nodes)]
    for value in values:
        if not isinstance(value, torch.Tensor) or value.shape or value.dtype not in _OF_NUMBERS:
            return False
    target: Any = node.target
    return target in FORMULAS or target in _CASTS or target in _MAKERS or target in _FILLED


def _made_of(node: torch.fx.Node) -> float:
    """Return the number with which a node fills a tensor."""
    number: Any = node.args[-1]
    return float(number)


def _is_element(node: torch.fx.Node, shape: tuple[int, ...]) -> bool:
    """Return whether a node is an elementwise operator on tensors of a shape and on numbers."""
    target: Any = node.target
    result: torch.Tensor = node.meta["val"]
    if tuple(result.shape) != shape or not shape or _held(result.dtype) not in _COMPUTED:
        return False
    if target in _FILLED or (target in _MAKERS and isinstance(node.args[-1], (int, float))):
        return True
    if target not in FORMULAS and target not in _CASTS:
        return False
    for source in node.all_input_nodes:
        value = source.meta["val"]
        if not isinstance(value, torch.Tensor):
            return False
        if value.shape and (tuple(value.shape) != shape or _held(value.dtype) not in _COMPUTED):
            return False
    return is_map(node)


_COMPUTED = (*_FLOATING, torch.bool)


def _held(dtype: torch.dtype) -> torch.dtype:
    return _HELD.get(dtype, dtype)


class FormulaLowering:
    """Adds the ops of one formula, for given parameters.

    Args:
        builder: The graph under construction.
        formula: The formula.
        place: The place of the step.
    """

    def __init__(
        self,
        builder: Builder,
        formula: UpdateFormula,
        place: Place,
    ) -> None:
        self._builder = builder
        self._formula = formula
        self._place = place
        self._nodes = list(formula.graph_module.graph.nodes)
        self._order = {node: position for position, node in enumerate(self._nodes)}
        self._values: dict[torch.fx.Node, Tensor] = {}
        self._shape: tuple[int, ...] = ()
        self._traced_shape: tuple[int, ...] = ()
        self._position = 0
        self._begin_numbers()
        self._begin_elements()

    def _begin_numbers(self) -> None:
        self._numbers = MapCode()
        self._of_number: dict[torch.fx.Node, MapValue] = {}
        self._number_results: list[Tensor] = []
        self._fixed: dict[torch.fx.Node, Tensor] = {}

    def _begin_elements(self) -> None:
        self._elements = MapCode()
        self._of_element: dict[torch.fx.Node, MapValue] = {}

    def lower(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        scaled: Sequence[int],
        scale: Tensor | None,
    ) -> None:
        """Add the ops.

        Args:
            inputs: The tensors of the formula's placeholders.
            outputs: A view of the whole of each weight and state, which the step overwrites.
            scaled: The positions of the gradients among the inputs.
            scale: The factor that the gradients contain; None for 1.
        """
        placeholders = [node for node in self._nodes if node.op == "placeholder"]
        self._shape = outputs[0].shape
        self._traced_shape = tuple(placeholders[0].meta["val"].shape)
        for node, tensor in zip(placeholders, inputs, strict=True):
            self._values[node] = tensor
        for position in scaled:
            self._begin_gradient(placeholders[position], scale)
        for position, node in enumerate(self._nodes):
            self._position = position
            if node.op == "get_attr":
                value = getattr(self._formula.graph_module, str(node.target))
                self._values[node] = self._builder.constant(value.detach().clone())
            elif node.op == "call_function":
                self._add(node)
        (output,) = self._formula.graph_module.graph.find_nodes(op="output")
        results: Any = output.args[0]
        self._finish(list(results), outputs)

    def _begin_gradient(self, node: torch.fx.Node, scale: Tensor | None) -> None:
        """Divide a gradient by its factor, and convert it to the dtype of its weight."""
        dtype = node.meta["val"].dtype
        gradient = self._values[node]
        if scale is None and gradient.dtype == dtype:
            return
        if gradient.dtype.is_complex:
            graph, own = self._builder.graph, MapCode()
            pairs = graph.as_real(gradient)
            result = own.value(pairs) if scale is None else own("div", pairs, scale)
            quotient = emit_map(
                self._builder, own, own("copy", result), pairs.dtype, pairs.shape, self._place
            )
            self._values[node] = graph.as_complex(quotient)
            return
        if gradient.shape and gradient.shape != self._shape:
            own = MapCode()
            result = own.value(gradient) if scale is None else own("div", gradient, scale)
            place = self._place
            self._values[node] = emit_map(
                self._builder, own, own("copy", result), dtype, gradient.shape, place
            )
            return
        del self._values[node]
        code = self._elements if gradient.shape else self._numbers
        value = code.value(gradient) if scale is None else code("div", gradient, scale)
        if gradient.shape:
            self._of_element[node] = code.stored(code("copy", value), dtype)
        else:
            self._of_number[node] = code("float32", value)

    def _add(self, node: torch.fx.Node) -> None:
        if isinstance(node.meta.get("val"), torch.Tensor):
            if _is_number(node):
                self._of_number[node] = self._number(node)
                return
            if self._traced_shape and _is_element(node, self._traced_shape):
                self._of_element[node] = self._element(node)
                return
        self._add_other(node)

    # --- Single numbers ---

    def _number(self, node: torch.fx.Node) -> MapValue:
        code = self._numbers
        target: Any = node.target
        if target in _FILLED:
            return code.value(_FILLED[target])
        if target in _MAKERS:
            return code.value(_made_of(node))
        args = [self._number_operand(one) for one in node.args]
        kwargs = {
            key: self._number_operand(one)
            for key, one in node.kwargs.items()
            if target not in _CASTS
        }
        if target in _CASTS:
            result = code.value(args[_CASTS.index(target)])
        else:
            result = code.value(FORMULAS[target](code, *args, **kwargs))
        dtype = node.meta["val"].dtype
        if dtype == torch.float32:
            return code("float32", result)
        if dtype in (torch.int64, torch.int32):
            return code("trunc", result)
        if dtype == torch.bool and target in _CASTS:
            return code("ne", result, 0.0)
        return result

    def _number_operand(self, argument: Any) -> Any:
        if not isinstance(argument, torch.fx.Node):
            return argument
        if argument in self._of_number:
            return self._of_number[argument]
        return self._numbers.value(self._values[argument])

    def _number_tensor(self, node: torch.fx.Node) -> Tensor:
        """Return a tensor of a number; the op that writes it is added by ``_end_numbers``."""
        if node in self._values:
            return self._values[node]
        # (float64 as well: later arithmetic continues where this one ends)
        tensor = self._builder.value(node.meta["val"].dtype, ())
        self._values[node] = tensor
        self._numbers.results.append(self._of_number[node])
        self._number_results.append(tensor)
        return tensor

    def _end_numbers(self) -> None:
        """Add the op of the numbers so far."""
        for node in self._of_number:
            if self._is_read_later(node):
                self._number_tensor(node)
        if self._number_results:
            self._emit_numbers()
        self._begin_numbers()

    def _emit_numbers(self) -> None:
        inputs = [self._builder.graph.tensors[i] for i in self._numbers.inputs]
        attributes: dict[str, Attribute] = self._numbers.attributes()
        attributes["dtypes"] = [dtype_name(tensor.dtype) for tensor in self._number_results]
        self._builder.op("numbers", inputs, self._number_results, attributes, place=self._place)

    # --- Elements of tensors ---

    def _element(self, node: torch.fx.Node) -> MapValue:
        code = self._elements
        target: Any = node.target
        result: torch.Tensor = node.meta["val"]
        if target in _FILLED:
            return code("copy", _FILLED[target])
        if target in _MAKERS:
            return code("copy", _made_of(node))
        args = [self._element_operand(one) for one in node.args]
        if target in _CASTS:
            value = code.value(args[_CASTS.index(target)])
        else:
            kwargs = {key: self._element_operand(one) for key, one in node.kwargs.items()}
            value = code.value(FORMULAS[target](code, *args, **kwargs))
        if result.dtype == torch.float16 or (result.dtype == torch.bool and target in _CASTS):
            return code.stored(value, result.dtype)
        return value

    def _element_operand(self, argument: Any) -> Any:
        if not isinstance(argument, torch.fx.Node):
            return argument
        if argument in self._of_element:
            return self._of_element[argument]
        if argument in self._of_number:
            return self._elements.value(self._number_tensor(argument))
        value = self._values[argument]
        if not value.shape and self._builder.graph.root(value).kind == TensorKind.VARIABLE:
            # A number that the step may overwrite before this op reads it.
            if argument not in self._fixed:
                self._fixed[argument] = self._builder.value(value.dtype, ())
                self._numbers.results.append(self._numbers.value(value))
                self._number_results.append(self._fixed[argument])
            value = self._fixed[argument]
        return self._elements.value(value)

    def _end_elements(self) -> None:
        """Add the op of the elementwise operators so far."""
        results = [node for node in self._of_element if self._is_read_later(node)]
        self._end_numbers()
        if results:
            tensors = [
                self._builder.value(_held(node.meta["val"].dtype), self._shape) for node in results
            ]
            self._elements.results = [self._of_element[node] for node in results]
            self._emit_elements(tensors)
            self._values.update(zip(results, tensors, strict=True))
        self._begin_elements()

    def _emit_elements(self, outputs: Sequence[Tensor]) -> None:
        inputs = [self._builder.graph.tensors[i] for i in self._elements.inputs]
        attributes: dict[str, Attribute] = self._elements.attributes()
        attributes["dtypes"] = [dtype_name(tensor.dtype) for tensor in outputs]
        attributes["shape"] = list(self._shape)
        self._builder.op("map", inputs, outputs, attributes, place=self._place)

    def _is_read_later(self, node: torch.fx.Node) -> bool:
        return any(self._order[user] >= self._position for user in node.users)

    # --- Other operators ---

    def _add_other(self, node: torch.fx.Node) -> None:
        self._end_elements()
        target: Any = node.target
        builder = self._builder
        if not isinstance(target, OpOverload) and target.__name__ != "getitem":
            raise InternalError(f"update formula: {target} is not an operator")
        if isinstance(target, OpOverload):
            reason = unsupported(node)
            if reason:
                raise Error(
                    f"Unsupported ops found in compiled model: [{schema_of(target).name}]. "
                    f"The optimizer's step uses it: {reason}"
                )
        for source in node.all_input_nodes:
            builder.values[source] = self._values_of(source)
        if target.__name__ == "getitem":
            values: Any = builder.values[node.args[0]]  # type: ignore[index]
            self._keep(node, values[node.args[1]])
            return
        if is_random(node):
            builder.new_stream(node)
        builder.need(node, *node.users)
        self._keep(node, RULES.rule_of(node).lower(builder, node, self._place))

    def _values_of(self, node: torch.fx.Node) -> Value:
        if node in self._values:
            return self._values[node]
        return self._builder.values[node]

    def _keep(self, node: torch.fx.Node, value: Value) -> None:
        self._builder.values[node] = value
        if isinstance(value, Tensor):
            self._values[node] = value

    # --- Results ---

    def _finish(self, results: Sequence[torch.fx.Node], outputs: Sequence[Tensor]) -> None:
        """Add the last ops, which overwrite weights and states."""
        self._position = len(self._nodes)
        graph = self._builder.graph
        whole: list[Tensor] = []
        copies: list[tuple[Tensor, Tensor]] = []
        whole_codes: list[MapValue] = []
        for node, output in zip(results, outputs, strict=True):
            shaped = output.shape == self._shape and bool(self._shape)
            if node in self._of_element:
                whole.append(output)
                whole_codes.append(self._of_element[node])
            elif node in self._of_number:
                self._numbers.results.append(self._of_number[node])
                self._number_results.append(output)
            else:
                source = self._values[node]
                if graph.root(source) is graph.root(output) and source.covers(output):
                    continue  # it stays as it is
                if shaped and source.dtype in _FLOATING:
                    whole.append(output)
                    whole_codes.append(self._elements("copy", source))
                    continue
                if graph.root(source).kind == TensorKind.VARIABLE:
                    source = self._copy(source)
                copies.append((source, output))
        self._elements.results = whole_codes
        if self._number_results:
            self._emit_numbers()
        if whole:
            self._emit_elements(whole)
        for source, output in copies:
            attributes: dict[str, Attribute] = {}
            if source.dtype != output.dtype:
                attributes["dtype"] = dtype_name(output.dtype)
            self._builder.op("copy", [source], [output], attributes, place=self._place)

    def _copy(self, tensor: Tensor) -> Tensor:
        copy = self._builder.value(tensor.dtype, tensor.shape)
        self._builder.op("copy", [tensor], [copy], place=self._place)
        return copy
