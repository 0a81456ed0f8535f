"""Changes through views that may show elements several times, or not at all.

For ``unfold``, PyTorch adds up the windows that show an element, whether they were changed or not,
and takes zeros for elements in no window. It refuses changes through most ``as_strided``. So such a
change becomes the change of a copy of the view, which is then written to its place in the memory.
So do changes of expanded tensors: PyTorch adds up what has changed in all repeats of an element.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.fx

from popsim_torch.errors import Error
from popsim_torch.private_torch.operators import OpOverload, schema_of
from popsim_torch.trace.graph.origin import origin_of
from popsim_torch.trace.graph.parts import is_in_place, is_view, viewed
from popsim_torch.trace.graph.repeated_writes import at_first_repeat, repeated_dimensions
from popsim_torch.trace.graph.strided_views import add_call_like, is_whole, memory_order
from popsim_torch.trace.graph.traced_tensors import host_computation

__all__ = ["write_windows_back"]

aten = torch.ops.aten

_WINDOWS = frozenset({aten.expand.default, aten.unfold.default, aten.as_strided.default})
# They write one value to all elements, so the order does not count.
_FILLS = frozenset({aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default})


def write_windows_back(graph: torch.fx.Graph) -> None:
    """Replace changes through windows that do not tile their tensor, in the given graph.

    Args:
        graph: A graph of ATen operators with fake tensors in ``meta["val"]``.

    Raises:
        Error: A change writes an element several times: what it becomes depends on the order.
    """
    known: dict[torch.fx.Node, bool] = {}
    for node in list(graph.nodes):
        changed = _changed(node)
        for key, given in changed:
            several = [] if isinstance(given, torch.fx.Node) else _nodes(given)
            for one in several:
                if _base(one, known) is not None:
                    raise _refused(node, one.meta["val"], "together with other tensors")
            if isinstance(given, torch.fx.Node) and (base := _base(given, known)) is not None:
                if len(changed) > 1:
                    raise _refused(node, given.meta["val"], "together with other tensors")
                change = at_first_repeat(graph, node)
                seen = given if change is node else change.args[0]
                _write_back(graph, change, key, cast(torch.fx.Node, seen), base)


def _changed(node: torch.fx.Node) -> list[tuple[int | str, Any]]:
    """Return the arguments that a node changes, each behind its position or name."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return []
    found: list[tuple[int | str, Any]] = []
    for i, one in enumerate(schema_of(node.target).arguments):
        if one.alias_info is not None and one.alias_info.is_write:
            is_named = i >= len(node.args)
            found.append((one.name, node.kwargs.get(one.name)) if is_named else (i, node.args[i]))
    return found


def _nodes(values: Any) -> list[torch.fx.Node]:
    found: list[torch.fx.Node] = []
    torch.fx.node.map_arg(values, found.append)
    return found


def _base(tensor: torch.fx.Node, known: dict[torch.fx.Node, bool]) -> torch.fx.Node | None:
    """Return the tensor that windows show, if ``tensor`` is seen through windows.

    It is as near as possible to the windows, but has all of its memory.
    """
    base = None
    while is_view(tensor) or is_in_place(tensor):
        source = viewed(tensor)
        if tensor.target in _WINDOWS and tensor not in known:
            known[tensor] = _is_certain(tensor, source)
        is_uncertain = not known.get(tensor, True)
        if is_uncertain or (base is tensor and not is_whole(tensor.meta["val"])):
            base = source
        tensor = source
    return base


def _is_certain(window: torch.fx.Node, source: torch.fx.Node) -> bool:
    """Return whether PyTorch finds the elements of a tensor in a changed view of it."""
    seen: torch.Tensor = window.meta["val"]
    if window.target is aten.as_strided.default or seen.numel() != source.meta["val"].numel():
        return False
    return not _repeats(seen)


def _repeats(seen: torch.Tensor) -> bool:
    """Return whether a view shows an element several times."""
    if seen.numel() == 0 or repeated_dimensions(seen):
        return seen.numel() > 0
    with host_computation():
        memory = torch.arange(_last_place(seen) + 1, device="cpu")
        places = memory.as_strided(seen.shape, seen.stride(), seen.storage_offset())
        ordered = places.flatten().sort().values
        return bool((ordered[1:] == ordered[:-1]).any())


def _last_place(seen: torch.Tensor) -> int:
    """Return the last place in memory that a tensor shows."""
    pairs = zip(seen.shape, seen.stride(), strict=True)
    return int(seen.storage_offset() + sum((size - 1) * stride for size, stride in pairs))


def _write_back(
    graph: torch.fx.Graph,
    node: torch.fx.Node,
    key: int | str,
    target: torch.fx.Node,
    base: torch.fx.Node,
) -> None:
    """Let a node change a copy of its argument ``target``, and write that to ``base``."""
    seen, value = target.meta["val"], base.meta["val"]
    first = seen.storage_offset() - value.storage_offset()
    is_inside = first >= 0 and _last_place(seen) <= _last_place(value)
    if not is_inside or not is_whole(value) or _kind(seen) != _kind(value):
        raise _refused(node, seen, "and other memory than that of the tensor that it shows")
    if _repeats(seen) and node.target not in _FILLS:
        problem = "in which elements occur several times: the result depends on their order"
        raise _refused(node, seen, problem)

    def call(function: OpOverload, *args: Any, **kwargs: Any) -> torch.fx.Node:
        return add_call_like(graph, node, value.fake_mode, function, *args, **kwargs)

    with graph.inserting_before(node):
        copy = call(aten.clone.default, target, memory_format=torch.contiguous_format)
    returned = schema_of(cast(OpOverload, node.target)).returns
    if any(one.alias_info is not None for one in returned):
        node.replace_all_uses_with(target)
    if isinstance(key, int):
        node.update_arg(key, copy)
    else:
        node.update_kwarg(key, copy)
    order = memory_order(value)
    with graph.inserting_before(node.next):
        ordered = call(aten.permute.default, base, order)
        memory = call(aten.clone.default, ordered, memory_format=torch.contiguous_format)
        flat = call(aten.view.default, memory, [-1])
        layout = list(seen.shape), list(seen.stride()), first
        written = call(aten.as_strided_scatter.default, flat, copy, *layout)
        shaped = call(aten.view.default, written, [value.shape[dim] for dim in order])
        back = sorted(range(len(order)), key=order.__getitem__)
        call(aten.copy_.default, base, call(aten.permute.default, shaped, back))


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, bool, bool]:
    return tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _refused(node: torch.fx.Node, seen: torch.Tensor, problem: str) -> Error:
    source, name = origin_of(node).source, schema_of(cast(OpOverload, node.target)).name
    return Error(
        f"{name}{f' at {source}' if source else ''} changes a view of shape {tuple(seen.shape)}, "
        f"made by expand, unfold or as_strided, {problem}. "
        "Change a part of the view in which no element occurs twice (windows[..., 0]), a copy "
        "(view.clone()) or the tensor itself, or compute new windows and add them up with F.fold."
    )
