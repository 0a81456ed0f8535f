"""Compares graphs, and takes parts of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate

__all__ = [
    "depends_on",
    "is_continued",
    "like_weights",
    "prepare",
    "results_of",
    "root_of",
    "simplify",
    "subgraph",
]

aten = torch.ops.aten
_SAME = frozenset(
    {
        aten.alias.default,
        aten.clone.default,
        aten.detach.default,
        aten.lift_fresh_copy.default,
        aten.alias_copy.default,
        aten.detach_copy.default,
    }
)
# Those that change the dtype or the shape, or nothing, and the place of their source.
_COPIES: dict[Any, int] = {
    aten._to_copy.default: 0,
    aten.view_copy.default: 0,
    aten.view.default: 0,
    aten.expand_copy.default: 0,
    aten.copy.default: 1,
}


def root_of(node: torch.fx.Node) -> torch.fx.Node:
    """Return the node whose value a node copies."""
    while (source := _source_of(node)) is not None:
        node = source
    return node


def _source_of(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the input that a node copies without a change; None if it does something else."""
    if node.op != "call_function":
        return None
    target: Any = node.target
    if target in _SAME:
        return node.args[0]  # type: ignore[return-value]
    if target in _COPIES:
        source: Any = node.args[_COPIES[target]]
        old, new = source.meta["val"], node.meta["val"]
        if old.dtype == new.dtype and old.shape == new.shape:
            return source  # type: ignore[no-any-return]
    return None


def prepare(module: torch.fx.GraphModule) -> None:
    """Take out of a recorded graph what only makes it slow to remove mutation.

    Markers of PyTorch's profiler surround each step of an optimizer. ``detach`` is a tensor with
    the same memory: without gradients it is the tensor itself, unless a shape changes in place.
    A copy of a number of the host is that number.
    """
    graph = module.graph
    changes_shapes = any(
        torch.Tag.inplace_view in getattr(node.target, "tags", ()) for node in graph.nodes
    )
    for node in reversed(graph.nodes):
        if getattr(node.target, "namespace", "") == "profiler":
            graph.erase_node(node)
        elif node.target is aten.detach.default and not changes_shapes:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target is aten.lift_fresh_copy.default:
            _fill_with_number(module, node)


def _fill_with_number(module: torch.fx.GraphModule, node: torch.fx.Node) -> None:
    """Make a copy of a number of the host a new tensor."""
    source: Any = node.args[0]
    value = getattr(module, str(source.target)) if source.op == "get_attr" else None
    if value is not None and not value.dim() and not value.is_complex():
        node.target, node.args = aten.full.default, ([], value.item())
        node.kwargs = {"dtype": value.dtype, "device": value.device, "pin_memory": False}


def like_weights(module: torch.fx.GraphModule, num_weights: int) -> None:
    """Make new tensors like weights, not like other tensors: only shape and dtype matter.

    Args:
        module: A graph whose first placeholders are weights, each with its gradient.
        num_weights: Their number.
    """
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    weights = placeholders[: 2 * num_weights : 2]
    for node in module.graph.nodes:
        if node.op != "call_function" or node.target not in _LIKE:
            continue
        given = node.args[0].meta["val"]
        if not given.dim() and root_of(node.args[0]) not in placeholders[: 2 * num_weights]:
            continue  # (a number, which a weight of no dimensions is not)
        for weight in weights:
            own = weight.meta["val"]
            if own.shape == given.shape and own.dtype == given.dtype:
                node.update_arg(0, weight)
                break


_LIKE = frozenset(
    {
        aten.empty_like.default,
        aten.full_like.default,
        aten.new_full.default,
        aten.new_ones.default,
        aten.new_zeros.default,
        aten.ones_like.default,
        aten.rand_like.default,
        aten.randn_like.default,
        aten.zeros_like.default,
    }
)


def depends_on(node: Any, others: Collection[torch.fx.Node], *, counts_shapes: bool = True) -> bool:
    """Return whether a value is computed from at least one of some nodes.

    Args:
        node: The value; anything that is no node depends on nothing.
        others: The nodes.
        counts_shapes: Whether a node counts that only tells the shape of a new tensor.
    """
    todo, seen = [node], set()
    while todo:
        one = todo.pop()
        if one in seen or not isinstance(one, torch.fx.Node):
            continue
        if one in others:
            return True
        seen.add(one)
        if counts_shapes or one.target not in _LIKE:
            todo += one.all_input_nodes
        else:
            todo += [given for given in one.all_input_nodes if given is not one.args[0]]
    return False


class _Numbering:
    """Numbers values of graphs; equal numbers are equal values."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def number(self, key: object) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def of(self, module: torch.fx.GraphModule, inputs: Sequence[int]) -> dict[torch.fx.Node, int]:
        """Return the number of each node.

        Args:
            module: The graph.
            inputs: The numbers of its placeholders.
        """
        numbers: dict[torch.fx.Node, int] = {}
        position = 0
        for node in module.graph.nodes:
            if node.op == "placeholder":
                numbers[node] = inputs[position]
                position += 1
            elif node.op == "get_attr":
                value = getattr(module, str(node.target))
                numbers[node] = self.number(("data", value.dtype, str(value.tolist())))
            elif node.op == "call_function":
                root = root_of(node)
                if root is not node:
                    numbers[node] = numbers[root]
                    continue
                numbers[node] = self.number(_key_of(node, numbers))
        return numbers


def _key_of(node: torch.fx.Node, numbers: Mapping[torch.fx.Node, int]) -> object:
    arguments: Any = (node.args, dict(node.kwargs))

    def described(one: Any) -> Any:
        return _Number(numbers[one]) if isinstance(one, torch.fx.Node) else one

    return str(node.target), repr(map_aggregate(arguments, described))


def simplify(graph: torch.fx.Graph) -> None:
    """Compute each value once, without copies, and choose only between values that differ."""
    numbering = _Numbering()
    numbers: dict[torch.fx.Node, int] = {}
    by_number: dict[int, torch.fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "output":
            continue
        if node.op != "call_function" or _is_random(node):
            numbers[node] = numbering.number(node)
            continue
        same: Any = _source_of(node)
        if node.target is aten.where.self:
            _, yes, no = map(numbers.get, node.args)
            if yes == no:
                same = node.args[1]
        if same is None:
            numbers[node] = numbering.number(_key_of(node, numbers))
            same = by_number.setdefault(numbers[node], node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _is_random(node: torch.fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


class _Number:
    def __init__(self, number: int) -> None:
        self._number = number

    def __repr__(self) -> str:
        return f"%{self._number}"


def is_continued(
    first: torch.fx.GraphModule,
    first_inputs: Sequence[object],
    begins: Mapping[object, int],
    later: torch.fx.GraphModule,
    later_inputs: Sequence[object],
) -> bool:
    """Return whether a first step is a later one, applied to the values with which states begin.

    Args:
        first: Computes weights and states, and then values with which states begin.
        first_inputs: What its placeholders are.
        begins: The places of the values with which states begin among its results.
        later: Computes weights and states from such and from the states of the last step.
        later_inputs: What its placeholders are.
    """
    numbering = _Numbering()
    of_first = numbering.of(first, list(map(numbering.number, first_inputs)))
    results = results_of(first)
    inputs = []
    for key in later_inputs:
        if key in begins:
            inputs.append(of_first[results[begins[key]]])
        else:
            inputs.append(numbering.number(key))
    of_later = numbering.of(later, inputs)
    ends = results_of(later)
    return all(of_first[a] == of_later[b] for a, b in zip(results, ends, strict=False))


def results_of(module: torch.fx.GraphModule) -> Sequence[torch.fx.Node]:
    """Return the nodes whose values a graph returns."""
    (output,) = module.graph.find_nodes(op="output")
    results: Sequence[torch.fx.Node] = output.args[0]
    return results


def subgraph(
    module: torch.fx.GraphModule, node: torch.fx.Node, inputs: Sequence[torch.fx.Node]
) -> torch.fx.GraphModule | None:
    """Return the graph that computes a node from some placeholders; None if others are needed."""
    graph = torch.fx.Graph()
    became = {one: graph.placeholder(one.name) for one in inputs}
    needed: set[torch.fx.Node] = set()
    todo = [node]
    while todo:
        one = todo.pop()
        if one in needed or one in became:
            continue
        if one.op == "placeholder":
            return None
        needed.add(one)
        todo += one.all_input_nodes
    for one in module.graph.nodes:
        if one in needed:
            became[one] = graph.node_copy(one, lambda source: became[source])
    graph.output(became[node])
    return torch.fx.GraphModule(module, graph)
