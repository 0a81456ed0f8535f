"""Changes through views that show elements several times, or not at all: ``unfold``, mostly.

PyTorch takes the changed elements of a tensor from each window that shows them, whether it was
changed or not, and zeros for elements in no window. So such a change becomes the change of a copy
of the view, and a scatter writes the elements of the copy to their places in the tensor.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.fx

from popsim_torch.errors import Error
from popsim_torch.private_torch.modes import disable_current_modes
from popsim_torch.private_torch.operators import OpOverload, schema_of
from popsim_torch.trace.graph.origin import origin_of
from popsim_torch.trace.graph.parts import is_in_place, is_view, viewed
from popsim_torch.trace.graph.traced_tensors import host_computation

__all__ = ["write_windows_back"]

aten = torch.ops.aten

_WINDOWS = frozenset({aten.unfold.default, aten.as_strided.default})
# They write one value to all elements, so the order does not count.
_FILLS = frozenset({aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default})


def write_windows_back(module: torch.fx.GraphModule) -> None:
    """Replace changes through windows that do not tile their tensor, in the given graph.

    Args:
        module: A graph of ATen operators with fake tensors in ``meta["val"]``.

    Raises:
        Error: A change writes an element several times: what it becomes depends on the order.
    """
    known: dict[torch.fx.Node, bool] = {}
    for node in list(module.graph.nodes):
        changed = _changed(node)
        for key, given in changed:
            several = [] if isinstance(given, torch.fx.Node) else _nodes(given)
            for one in several:
                if _base(one, known) is not None:
                    raise _refused(node, one.meta["val"], "together with other tensors")
            if isinstance(given, torch.fx.Node) and (base := _base(given, known)) is not None:
                if len(changed) > 1:
                    raise _refused(node, given.meta["val"], "together with other tensors")
                _write_back(module.graph, node, key, given, base)


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
        if is_uncertain or (base is tensor and not _is_whole(tensor.meta["val"])):
            base = source
        tensor = source
    return base


def _is_certain(window: torch.fx.Node, source: torch.fx.Node) -> bool:
    """Return whether PyTorch finds the elements of a tensor in a changed view of it."""
    seen: torch.Tensor = window.meta["val"]
    if window.target is aten.unfold.default and seen.numel() != source.meta["val"].numel():
        return False
    return not _repeats(seen)


def _repeats(seen: torch.Tensor) -> bool:
    """Return whether a view shows an element several times."""
    if seen.numel() == 0:
        return False
    with host_computation():
        memory = torch.arange(_last_place(seen) + 1, device="cpu")
        places = memory.as_strided(seen.shape, seen.stride(), seen.storage_offset())
        ordered = places.flatten().sort().values
        return bool((ordered[1:] == ordered[:-1]).any())


def _last_place(seen: torch.Tensor) -> int:
    """Return the last place in memory that a tensor shows."""
    pairs = zip(seen.shape, seen.stride(), strict=True)
    return int(seen.storage_offset() + sum((size - 1) * stride for size, stride in pairs))


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has all elements of its part of the memory, each of them once."""
    return tensor.permute(_order(tensor)).is_contiguous()


def _order(tensor: torch.Tensor) -> list[int]:
    """Return the dimensions of a tensor in the order of the memory."""
    sizes = list(zip(tensor.stride(), tensor.shape, strict=True))
    return sorted(range(tensor.dim()), key=lambda dim: sizes[dim], reverse=True)


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
    if not is_inside or not _is_whole(value) or _kind(seen) != _kind(value):
        raise _refused(node, seen, "and other memory than that of the tensor that was unfolded")
    if _repeats(seen) and node.target not in _FILLS:
        problem = "in which elements occur several times: the result depends on their order"
        raise _refused(node, seen, problem)

    def call(function: OpOverload, *args: Any, **kwargs: Any) -> torch.fx.Node:
        made = graph.call_function(function, args, kwargs)
        made.meta = {name: entry for name, entry in node.meta.items() if name != "val"}
        given: Any = torch.fx.node.map_arg((args, kwargs), lambda one: one.meta["val"])
        with disable_current_modes(), value.fake_mode:
            made.meta["val"] = function(*given[0], **given[1])
        return made

    def flat(tensor: torch.fx.Node) -> torch.fx.Node:
        copy = call(aten.clone.default, tensor, memory_format=torch.contiguous_format)
        return call(aten.view.default, copy, [-1])

    with graph.inserting_before(node):
        copy = call(aten.clone.default, target, memory_format=torch.contiguous_format)
    returned = schema_of(cast(OpOverload, node.target)).returns
    if any(one.alias_info is not None for one in returned):
        node.replace_all_uses_with(target)
    if isinstance(key, int):
        node.update_arg(key, copy)
    else:
        node.update_kwarg(key, copy)
    order = _order(value)
    with graph.inserting_before(node.next):
        every = call(aten.arange.default, value.numel(), dtype=torch.int64, device=value.device)
        places = call(aten.as_strided.default, every, list(seen.shape), list(seen.stride()), first)
        memory = call(aten.permute.default, base, order)
        written = call(aten.scatter.src, flat(memory), 0, flat(places), flat(copy))
        shaped = call(aten.view.default, written, [value.shape[dim] for dim in order])
        back = sorted(range(len(order)), key=order.__getitem__)
        call(aten.copy_.default, base, call(aten.permute.default, shaped, back))


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, bool, bool]:
    return tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _refused(node: torch.fx.Node, seen: torch.Tensor, problem: str) -> Error:
    source, name = origin_of(node).source, schema_of(cast(OpOverload, node.target)).name
    return Error(
        f"{name}{f' at {source}' if source else ''} changes a view of shape {tuple(seen.shape)}, "
        f"made by unfold or as_strided, {problem}. "
        "Change a part of the view in which no element occurs twice (windows[..., 0]), change the "
        "tensor itself, or compute new windows and add them up with F.fold."
    )
