"""Values that are known while a model is traced.

A tensor that forward makes from Python numbers, NumPy arrays or tensors of the host has the same
values in every run; so have the parameters and buffers that are constants. The recorded graph tells
how they come about: where forward asks for one (``if tensor:``, a size, a mask), the part of the
graph that the tensor depends on is computed then and there, with every change in place up to now.
What nobody asks for is not computed. What was computed is kept for the next question, unless that
needs something from in front of a change in place: the graph alone is the truth.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate

from popsim_torch.errors import Error
from popsim_torch.private_torch.modes import TorchDispatchMode
from popsim_torch.private_torch.operators import OpOverload, opname, schema_of
from popsim_torch.private_torch.proxies import get_proxy_mode
from popsim_torch.private_torch.tensors import storage_key
from popsim_torch.private_torch.trees import tree_iter, tree_map_only
from popsim_torch.trace.books.result import TraceResult
from popsim_torch.trace.graph.markers import CONSTANT, MARK, PRINT
from popsim_torch.trace.graph.origin import user_line
from popsim_torch.trace.graph.traced_tensors import (
    current_graph,
    find_node,
    host_computation,
    is_batched,
    is_traced,
    node_of,
)

aten = torch.ops.aten

_UNSET = frozenset(
    {
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
    }
)
# Take a shape, a device and an element type from their first argument, and none of its values.
_TAKE_SHAPE = frozenset(
    {
        *("empty_like", "full_like", "ones_like", "zeros_like"),
        *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"),
    }
)
_MASKS = (torch.bool, torch.uint8)
_SPELT = {
    "item": "tensor.item() or tensor.tolist()",
    "tolist": "tensor.tolist()",
    "__float__": "float(tensor)",
    "__int__": "int(tensor)",
}
TO_PYTHON = frozenset(_SPELT)
"""Methods of tensors that make Python numbers of their values."""


class KnownValues(TorchDispatchMode):
    """The mode that answers operators which need values, while ``forward`` runs.

    Args:
        result: The trace; has the data of constants.
        constant: Returns a traced tensor for the data of a host tensor.

    Attributes:
        graph: The graph that is recorded.
    """

    def __init__(
        self, result: TraceResult, constant: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self._result = result
        self._constant = constant
        self.graph: torch.fx.Graph | None = None
        # Placeholders of constants, with name and tensor of the host; what was read, and where.
        self._state: dict[torch.fx.Node, tuple[str, torch.Tensor]] = {}
        self._read: dict[torch.fx.Node, str] = {}
        self._last: torch.fx.Node | None = None
        # What was computed so far, in the order of the graph, and the last change in place there.
        self._values: dict[torch.fx.Node, Any] = {}
        self._last_write: torch.fx.Node | None = None
        # Nodes that change memory in place, by the memory.
        self._writers: defaultdict[int, list[torch.fx.Node]] = defaultdict(list)

    def start(self, state: Mapping[str, torch.Tensor]) -> None:
        """Begin a trace in which parameters and buffers are these traced tensors, by name."""
        host = {**self._result.parameters, **self._result.buffers}
        self.graph = current_graph()
        self._state = {
            node_of(state[name]): (name, tensor)
            for name, tensor in host.items()
            if self._result.is_constant(name)
        }

    def read_constants(self) -> set[str]:
        """Return the names of parameters and buffers that forward took values from.

        Raises:
            Error: Forward has changed one of them since: eager PyTorch would read another value in
                the next call.
        """
        for node, line in self._read.items():
            if self._is_changed(node):
                raise Error(
                    "aten::item is only supported in eager mode: forward reads the value of "
                    f"'{self._state[node][0]}'{line} and changes it in place after that. It would "
                    "be another value in each run, but the model is traced once. Count outside of "
                    "the model, and pass the number as an input."
                )
        return {self._state[node][0] for node in self._read}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, or answer it from known values."""
        kwargs = kwargs or {}
        if torch.Tag.data_dependent_output in func.tags:
            arguments = tree_map_only(torch.Tensor, self._value, (args, kwargs))
            return _on_host(func, arguments)
        if torch.Tag.dynamic_output_shape in func.tags:
            return self._of_dynamic_shape(func, args, kwargs)
        return func(*args, **kwargs)

    def find(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a host tensor with the values that a tensor has now; None if not known."""
        if not is_traced(tensor):
            return tensor
        if is_batched(tensor):
            return None
        node = node_of(tensor)
        needed = self._needed(node) if node.graph is self.graph else None
        if needed and self._last_write is not None and needed[0] < self._last_write:
            # Something that reads what has been written over since.
            self._forget_values()
            needed = self._needed(node)
        if needed is None:
            return None
        mode: Any = get_proxy_mode()
        with host_computation(), torch.no_grad():
            try:
                for step in needed:
                    self._run(step, mode.tracer.root)
            except BaseException:
                self._forget_values()
                raise
            result: torch.Tensor = self._values[node].clone()
        return result

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        value = self.find(tensor)
        if value is None:
            raise reads_device(tensor)
        return value

    def close(self) -> None:
        """Forget the trace."""
        del self._result
        self._state = {}
        self._read = {}
        self._forget_values()
        self.graph = self._last = None
        self._writers.clear()

    def forget(self, gone: set[torch.fx.Node], last: torch.fx.Node) -> None:
        """Forget nodes that were taken out of the graph; ``last`` stood in front of them."""
        if self._last in gone:
            self._last = last
        for memory, writers in self._writers.items():
            self._writers[memory] = [node for node in writers if node not in gone]
        self._forget_values()

    def _forget_values(self) -> None:
        self._values.clear()
        self._last_write = None

    def _of_dynamic_shape(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator whose results have the shape that values say."""
        if func is aten.index.Tensor:
            return func(args[0], self._without_masks(func, args[1]))
        if func is aten.masked_select.default:
            source, mask = args
            source, mask = torch.broadcast_tensors(source, mask)  # type: ignore[no-untyped-call]
            return aten.index.Tensor(source, self._without_masks(func, [mask]))
        arguments = tree_map_only(
            torch.Tensor, lambda tensor: self._shaping(func, tensor), (args, kwargs)
        )
        return tree_map_only(torch.Tensor, self._constant, _on_host(func, arguments))

    def _without_masks(self, func: Any, indices: list[torch.Tensor | None]) -> list[Any]:
        """Return the indices of an operator with positions in the place of masks."""
        result: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in _MASKS:
                result.append(index)
            else:
                mask = self._shaping(func, index)
                with host_computation():
                    positions = mask.nonzero(as_tuple=True)
                result += map(self._constant, positions)
        return result

    def _shaping(self, func: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values of a tensor that an operator's result takes its shape from."""
        value = self.find(tensor)
        if value is None:
            raise Error(
                f"The shape of the result of {func}{user_line(' at ')} depends on values of the "
                "device, which do not exist while the model is traced. Use masks or torch.where, "
                "and fixed sizes."
            )
        return value

    def _needed(self, node: torch.fx.Node) -> list[torch.fx.Node] | None:
        """Return what to compute for a node's value now, in order; None if it is not known."""
        self._note_writers(node.graph)
        needed: set[torch.fx.Node] = set()
        todo: list[tuple[torch.fx.Node, torch.fx.Node | None]] = [(node, None)]
        while todo:
            current, reader = todo.pop()
            if current not in self._values and current not in needed:
                if not self._is_computable(current):
                    return None
                needed.add(current)
                todo += [(operand, current) for operand in _operands(current)]
            for writer in self._writers_before(current, reader):
                if writer not in needed:
                    todo.append((writer, writer))
        return sorted(needed)

    def _writers_before(
        self, node: torch.fx.Node, reader: torch.fx.Node | None
    ) -> Iterator[torch.fx.Node]:
        """Return what changes a node's memory in front of a reader and was not computed yet."""
        for memory in memories_of(node):
            for writer in reversed(self._writers.get(memory, ())):
                if writer in self._values:
                    break
                if reader is None or writer < reader:
                    yield writer

    def _is_computable(self, node: torch.fx.Node) -> bool:
        if node.op == "placeholder":
            return node in self._state and not self._is_changed(node)
        return _is_computable(node)

    def _is_changed(self, placeholder: torch.fx.Node) -> bool:
        self._note_writers(placeholder.graph)
        return any(memory in self._writers for memory in memories_of(placeholder))

    def _note_writers(self, graph: torch.fx.Graph) -> None:
        """Take note of changes in place among the nodes that were recorded since the last time."""
        node = next(iter(graph.nodes)) if self._last is None else self._last.next
        while node.op != "root":
            for changed in changed_arguments(node):
                for memory in memories_of(changed):
                    self._writers[memory].append(node)
            self._last, node = node, node.next

    def _run(self, node: torch.fx.Node, root: torch.nn.Module) -> None:
        """Compute a node."""
        if node.op == "placeholder":
            self._read.setdefault(node, user_line(" at "))
        self._values[node] = self._compute(node, root)
        if next(changed_arguments(node), None) is not None:
            self._last_write = node

    def _compute(self, node: torch.fx.Node, root: torch.nn.Module) -> Any:
        if node.target is CONSTANT:
            index: Any = node.args[2]
            return self._result.constants[index].clone()
        if node.op == "placeholder":
            return self._state[node][1].detach().clone()
        if node.op == "get_attr":
            attribute: torch.Tensor = getattr(root, str(node.target))
            return attribute.clone()

        def argument(value: Any) -> Any:
            if isinstance(value, torch.fx.Node):
                return self._values[value] if value in self._values else _unset(value)
            return torch.device("cpu") if isinstance(value, torch.device) else value

        args: Any = map_aggregate(node.args, argument)
        kwargs: Any = map_aggregate(node.kwargs, argument)
        if node.target in (MARK, PRINT):
            return args[0].clone()
        target: Any = node.target
        result = target(*args, **kwargs)
        # The device has zeros in memory that nothing was written to.
        return result.zero_() if opname(target) in _UNSET else result


def reads_device(tensor: torch.Tensor, call: str = "") -> Error:
    """Return the error for forward's reading a value of the device.

    Args:
        tensor: What it reads.
        call: The method that reads it, where that makes Python numbers, one of ``TO_PYTHON``.
    """
    begin = (
        "aten::item is only supported in eager mode: forward reads the value of "
        f"{_described(find_node(tensor))}{user_line(' at ')}, a tensor on the device of shape "
        f"{tuple(tensor.shape)}, which does not exist while the model is traced"
    )
    if call in _SPELT:
        return Error(
            f"{begin} ({_SPELT[call]}). Go on with the tensor itself. To "
            "see its value, return it from forward and read it in what the model returns, or call "
            "poptorch.ipu_print_tensor(tensor), which prints it while the model runs."
        )
    return Error(
        f"{begin} (`if tensor:`, a tensor as a size or a fill value). Write "
        "torch.where(condition, a, b) in the place of `if condition:`, or "
        "poptorch.cond(condition, then_body, then_inputs, else_body, else_inputs); or return the "
        "tensor and decide outside of the model."
    )


def _described(node: torch.fx.Node | None) -> str:
    if node is None:
        return "a tensor"
    if node.op == "placeholder":
        return "a parameter, buffer or input"
    target: Any = node.target
    if target is operator.getitem:
        return _described(node.all_input_nodes[0])
    return f"a result of {getattr(target, 'overloadpacket', target)}"


def _on_host(func: Any, arguments: Any) -> Any:
    args, kwargs = arguments
    with host_computation():
        return func(*args, **kwargs)


def _is_computable(node: torch.fx.Node) -> bool:
    """Whether a node gives the same in every run, if what it reads does."""
    target: Any = node.target
    if node.op == "get_attr" or target in (operator.getitem, CONSTANT, MARK, PRINT):
        return True
    return (
        isinstance(target, OpOverload)
        and target.namespace in ("aten", "prims")
        and torch.Tag.nondeterministic_seeded not in target.tags
    )


def _operands(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the nodes whose values a node reads."""
    if opname(node.target) in _TAKE_SHAPE:
        return [operand for operand in node.all_input_nodes if operand is not node.args[0]]
    return node.all_input_nodes


def _unset(node: torch.fx.Node) -> torch.Tensor:
    """Return a tensor of the host with the shape and the type of a node's result, and no values."""
    like: torch.Tensor = node.meta["val"]
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")


def changed_arguments(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Return the arguments that a node's operator changes in place."""
    target: Any = node.target
    if not isinstance(target, OpOverload) or not schema_of(target).is_mutable:
        return
    for position, argument in enumerate(schema_of(target).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[position] if position < len(node.args) else None
            given = node.kwargs.get(argument.name, given)
            yield from (value for value in tree_iter(given) if isinstance(value, torch.fx.Node))


def memories_of(node: torch.fx.Node) -> Iterator[int]:
    """Return what identifies the memory of each of a node's results."""
    for value in tree_iter(node.meta.get("val")):
        if isinstance(value, torch.Tensor):
            yield storage_key(value)
