"""Values that are known while a model is traced.

A tensor that forward makes from Python numbers, NumPy arrays or tensors of the host has the same
values in every run. The recorded graph tells how they come about: where forward asks for one (``if
tensor:``, a size, a mask), the part of the graph that the tensor depends on is computed then and
there, with every change in place up to now. What nobody asks for is not computed, and nothing
computed here is kept: the graph alone is the truth.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from popsim_torch.errors import Error
from popsim_torch.trace.markers import CONSTANT, MARK, PRINT
from popsim_torch.trace.origin import user_line
from popsim_torch.trace.traced_tensors import host_computation, is_batched, is_traced, node_of

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
_MASKS = (torch.bool, torch.uint8)


class KnownValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The mode that answers operators which need values, while ``forward`` runs.

    Args:
        data: Data of the ``popsim::constant`` nodes, by index.
        constant: Returns a traced tensor for the data of a host tensor.

    Attributes:
        graph: The graph that is recorded.
    """

    def __init__(
        self, data: list[torch.Tensor], constant: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._data = data
        self._constant = constant
        self.graph: torch.fx.Graph | None = None
        self._last: torch.fx.Node | None = None
        # Nodes that change memory in place, by the memory.
        self._writers: defaultdict[int, list[torch.fx.Node]] = defaultdict(list)

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
        if needed is None:
            return None
        mode: Any = get_proxy_mode()
        values: dict[torch.fx.Node, Any] = {}
        with host_computation(), torch.no_grad():
            for step in needed:
                values[step] = self._compute(step, values, mode.tracer.root)
        result: torch.Tensor = values[node]
        return result

    def _value(self, tensor: torch.Tensor) -> torch.Tensor:
        value = self.find(tensor)
        if value is None:
            raise reads_device()
        return value

    def clear(self) -> None:
        """Forget the graph and the data."""
        self._data = []
        self.graph = self._last = None
        self._writers.clear()

    def forget(self, gone: set[torch.fx.Node], last: torch.fx.Node) -> None:
        """Forget nodes that were taken out of the graph; ``last`` stood in front of them."""
        if self._last in gone:
            self._last = last
        for memory, writers in self._writers.items():
            self._writers[memory] = [node for node in writers if node not in gone]

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
        todo = [node]
        while todo:
            current = todo.pop()
            if current in needed:
                continue
            if not _is_computable(current):
                return None
            needed.add(current)
            todo += current.all_input_nodes
            for memory in memories_of(current):
                todo += self._writers.get(memory, ())
        return sorted(needed)

    def _note_writers(self, graph: torch.fx.Graph) -> None:
        """Take note of changes in place among the nodes that were recorded since the last time."""
        node = next(iter(graph.nodes)) if self._last is None else self._last.next
        while node.op != "root":
            for changed in changed_arguments(node):
                for memory in memories_of(changed):
                    self._writers[memory].append(node)
            self._last, node = node, node.next

    def _compute(
        self, node: torch.fx.Node, values: dict[torch.fx.Node, Any], root: torch.nn.Module
    ) -> Any:
        if node.target is CONSTANT:
            index: Any = node.args[2]
            return self._data[index].clone()
        if node.op == "get_attr":
            attribute: torch.Tensor = getattr(root, str(node.target))
            return attribute.clone()

        def argument(value: Any) -> Any:
            if isinstance(value, torch.fx.Node):
                return values[value]
            return torch.device("cpu") if isinstance(value, torch.device) else value

        args: Any = map_aggregate(node.args, argument)
        kwargs: Any = map_aggregate(node.kwargs, argument)
        if node.target in (MARK, PRINT):
            return args[0].clone()
        target: Any = node.target
        result = target(*args, **kwargs)
        # The device has zeros in memory that nothing was written to.
        return result.zero_() if getattr(target, "_opname", "") in _UNSET else result


def reads_device() -> Error:
    """Return the error for forward's reading a value of the device."""
    return Error(
        "aten::item is only supported in eager mode: forward reads the value of a tensor on the "
        f"device{user_line(' at ')}, which does not exist while the model is traced (`if tensor:`, "
        "float(tensor), tensor.item(), a tensor as a size or a fill value). Write "
        "torch.where(condition, a, b) in the place of `if condition:`, or return the tensor and "
        "decide outside of the model."
    )


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
        isinstance(target, torch._ops.OpOverload)
        and target.namespace in ("aten", "prims")
        and torch.Tag.nondeterministic_seeded not in target.tags
    )


def changed_arguments(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Return the arguments that a node's operator changes in place."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return
    for position, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[position] if position < len(node.args) else None
            given = node.kwargs.get(argument.name, given)
            yield from (value for value in tree_iter(given) if isinstance(value, torch.fx.Node))


def memories_of(node: torch.fx.Node) -> Iterator[int]:
    """Return what identifies the memory of each of a node's results."""
    for value in tree_iter(node.meta.get("val")):
        if isinstance(value, torch.Tensor):
            yield value.untyped_storage()._cdata
