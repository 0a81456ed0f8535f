"""Values that are known during the trace of a model.

A tensor that forward makes from Python numbers, NumPy arrays or host tensors has the same values in
every run. So have the parameters and buffers that are constants. The recorded graph says how they
are computed: where forward asks for a value (``if tensor:``, a size, a mask), the nodes that the
tensor depends on are computed immediately, with every change in place so far. Other values are not
computed. Computed values are kept for later requests, unless a request needs a value from before a
change in place: only the graph decides.
"""

from __future__ import annotations

import contextlib
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate

from popsim_torch.errors import Error
from popsim_torch.private_torch.autograd import is_in_own_gradient
from popsim_torch.private_torch.modes import TorchDispatchMode
from popsim_torch.private_torch.operators import OpOverload, opname, schema_of
from popsim_torch.private_torch.proxies import get_proxy_mode
from popsim_torch.private_torch.tensors import storage_key
from popsim_torch.private_torch.trees import tree_iter, tree_map_only
from popsim_torch.trace.books.result import TraceResult
from popsim_torch.trace.graph.device import has_fixed_shapes
from popsim_torch.trace.graph.device_types import made_by_class
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
# Take shape, device and dtype from their first argument, but none of its values.
_TAKE_SHAPE = frozenset(
    {
        *("empty_like", "full_like", "ones_like", "zeros_like"),
        *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"),
    }
)
# Of the checks that PyTorch makes in gradients of decompositions.
_TOLERANCES = (1e-2, 1e-2)
_ILL_DEFINED = (
    "The loss depends on the phase of singular vectors or eigenvectors, which is not unique, so "
    "its gradient is ill-defined. Use a loss that does not change when a vector is multiplied by a "
    "complex number of magnitude 1, such as one of abs()."
)
# What the device has to find in a check of PyTorch's that is being recorded, if its result is not
# known: a number that is zero; else this message.
_check_later: ContextVar[str | None] = ContextVar("popsim_torch_check_later", default=None)
_MASKS = (torch.bool, torch.uint8)
_SPELT = {
    "item": "tensor.item() or tensor.tolist()",
    "tolist": "tensor.tolist()",
    "__float__": "float(tensor)",
    "__int__": "int(tensor)",
}
TO_PYTHON = frozenset(_SPELT)
"""Methods of tensors that convert their values to Python numbers."""


class KnownValues(TorchDispatchMode):
    """The mode that runs operators which need values, while ``forward`` runs.

    Args:
        result: The trace; it has the data of constants.
        constant: Returns a traced tensor for the data of a host tensor.

    Attributes:
        graph: The graph that is being recorded.
    """

    def __init__(
        self, result: TraceResult, constant: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()
        self._result = result
        self._constant = constant
        self.graph: torch.fx.Graph | None = None
        # Placeholders of constants, with name and host tensor; the nodes that were read, and where.
        self._state: dict[torch.fx.Node, tuple[str, torch.Tensor]] = {}
        self._read: dict[torch.fx.Node, str] = {}
        self._last: torch.fx.Node | None = None
        # Values computed so far, in the order of the graph, and the last change in place among
        # them.
        self._values: dict[torch.fx.Node, Any] = {}
        self._last_write: torch.fx.Node | None = None
        # Nodes that change memory in place, by memory.
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
        """Return the names of parameters and buffers whose values forward has read.

        Raises:
            Error: Forward has changed one of them after the read: eager PyTorch would read another
                value in the next call.
        """
        for node, line in self._read.items():
            if self._is_changed(node):
                raise Error(
                    "aten::item is only supported in eager mode: forward reads the value of "
                    f"'{self._state[node][0]}'{line} and changes it in place after that. The value "
                    "would differ in each run, but the model is traced once. Count outside of "
                    "the model, and pass the number as an input."
                )
        return {self._state[node][0] for node in self._read}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, or compute it from known values."""
        kwargs = kwargs or {}
        if torch.Tag.data_dependent_output in func.tags:
            if func is aten.allclose.default and args[2:] == _TOLERANCES and is_in_own_gradient():
                return _checked_later(*args)
            if (message := _check_later.get()) is not None:
                return self._check(args[0], message)
            arguments = tree_map_only(torch.Tensor, self._value, (args, kwargs))
            return _on_host(func, arguments)
        if torch.Tag.dynamic_output_shape in func.tags and not has_fixed_shapes(func, kwargs):
            return self._of_dynamic_shape(func, args, kwargs)
        return func(*args, **made_by_class(func, kwargs))

    def _check(self, tensor: torch.Tensor, message: str) -> bool:
        """Check that a number is zero, in each run if it is not known; return that it is."""
        value = self.find(tensor)
        if value is None:
            torch.ops.aten._assert_async.msg(tensor.logical_not(), message)
        elif _on_host(bool, ((value,), {})):
            raise Error(f"{message}{user_line(' This is the call at ')}.")
        return False

    def find(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a host tensor with the present values of a tensor; None if they are not known."""
        if not is_traced(tensor):
            return tensor
        if is_batched(tensor):
            return None
        node = node_of(tensor)
        needed = self._needed(node) if node.graph is self.graph else None
        if needed and self._last_write is not None and needed[0] < self._last_write:
            # A node reads a value that has been overwritten since.
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
        """Forget nodes that were removed from the graph; ``last`` came before them."""
        if self._last in gone:
            self._last = last
        for memory, writers in self._writers.items():
            self._writers[memory] = [node for node in writers if node not in gone]
        self._forget_values()

    def _forget_values(self) -> None:
        self._values.clear()
        self._last_write = None

    def _of_dynamic_shape(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator whose result shapes depend on values."""
        if func is aten.index.Tensor:
            return func(args[0], self._without_masks(func, args[1]))
        if func is aten.masked_select.default:
            source, mask = args
            source, mask = torch.broadcast_tensors(source, mask)  # type: ignore[no-untyped-call]
            if not source.dim():
                source, mask = source.unsqueeze(0), mask.unsqueeze(0)
            return aten.index.Tensor(source, self._without_masks(func, [mask]))
        arguments = tree_map_only(
            torch.Tensor, lambda tensor: self._shaping(func, tensor), (args, kwargs)
        )
        return tree_map_only(torch.Tensor, self._constant, _on_host(func, arguments))

    def _without_masks(self, func: Any, indices: list[torch.Tensor | None]) -> list[Any]:
        """Return the indices of an operator, with masks replaced by positions."""
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
        """Return the values of a tensor that determine the shape of an operator's result."""
        value = self.find(tensor)
        if value is None:
            todo = "Use masks or torch.where, and fixed sizes."
            if tensor.dtype in _MASKS and "aten.index." in str(func):
                todo = (
                    "Instead of y[mask] += z[mask], write y = torch.where(mask, y + z, y); instead "
                    "of y[mask].sum(), (y * mask).sum()."
                )
            raise Error(
                f"The shape of the result of {func}{user_line(' at ')} depends on values of the "
                f"device, which do not exist while the model is traced. {todo}"
            )
        return value

    def _needed(self, node: torch.fx.Node) -> list[torch.fx.Node] | None:
        """Return the nodes to compute for a node's present value, in order; None if not known."""
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
        """Return the nodes that change a node's memory before a reader and are not computed yet."""
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
        """Record the changes in place among the nodes that were added since the last call."""
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
            name, tensor = self._state[node]
            if tensor.is_meta:
                raise Error(
                    f"forward needs the value of '{name}', which is on the device 'meta' and has "
                    "no values. Make this tensor on the CPU; the others may stay on 'meta'."
                )
            return tensor.detach().clone()
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
        # Memory of the device that was never written has zeros.
        return result.zero_() if opname(target) in _UNSET else result


@contextlib.contextmanager
def checked_by_device(message: str) -> Iterator[None]:
    """Let the device make the check of a function that reads whether something is wrong.

    Args:
        message: The message of the error that a run raises.
    """
    token = _check_later.set(message)
    try:
        yield
    finally:
        _check_later.reset(token)


def reads_device(tensor: torch.Tensor, call: str = "") -> Error:
    """Return the error for a read of a device value in forward.

    Args:
        tensor: The tensor that forward reads.
        call: The method that reads it, if it is one of ``TO_PYTHON``.
    """
    begin = (
        "aten::item is only supported in eager mode: forward reads the value of "
        f"{_described(find_node(tensor))}{user_line(' at ')}, a tensor on the device of shape "
        f"{tuple(tensor.shape)}, which does not exist while the model is traced"
    )
    if call in _SPELT:
        return Error(
            f"{begin} ({_SPELT[call]}). Use the tensor itself instead. To "
            "see its value, return it from forward and read it in the result of the model, or call "
            "poptorch.ipu_print_tensor(tensor), which prints it while the model runs."
        )
    return Error(
        f"{begin} (`if tensor:`, a tensor as a size or a fill value). Write "
        "torch.where(condition, a, b) instead of `if condition:`, or "
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


def _checked_later(one: torch.Tensor, other: torch.Tensor, rtol: float, atol: float) -> bool:
    """Let the device make the check, and return the result with which the gradient goes on.

    Decompositions with complex numbers are unique up to a phase; their gradients check that the
    loss does not depend on it.
    """
    torch.ops.aten._assert_async.msg(torch.isclose(one, other, rtol, atol).all(), _ILL_DEFINED)
    return True


def _on_host(func: Any, arguments: Any) -> Any:
    args, kwargs = arguments
    with host_computation():
        return func(*args, **kwargs)


def _is_computable(node: torch.fx.Node) -> bool:
    """Return whether a node gives the same result in every run, if its inputs do."""
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
    """Return a host tensor with the shape and dtype of a node's result, with unset values."""
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
    """Return an id for the memory of each of a node's results."""
    for value in tree_iter(node.meta.get("val")):
        if isinstance(value, torch.Tensor):
            yield storage_key(value)
