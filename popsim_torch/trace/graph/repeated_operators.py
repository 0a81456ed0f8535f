"""Records operators that were recorded before with such arguments, without asking PyTorch again.

PyTorch's recorder takes most of the time of a trace: for each operator it looks for the rule of its
shapes, runs it, and describes the results. Models call few operators with many different shapes. So
the first call with arguments of some shapes goes to PyTorch, and its node and its results are
compared with what this file would make. If both are equal, later calls are made here.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.fx

from popsim_torch.private_torch.fake import FakeTensor
from popsim_torch.private_torch.modes import TorchDispatchMode
from popsim_torch.private_torch.operators import OpOverload, schema_of
from popsim_torch.private_torch.proxies import (
    add_call,
    constant_or_node,
    current_tracer,
    last_node,
    track,
)
from popsim_torch.private_torch.tensors import storage_key
from popsim_torch.trace.graph.origin import copy_channel
from popsim_torch.trace.graph.traced_tensors import TraceMode, is_plain, layout_of

__all__ = ["RepeatedOperators"]

_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
_ASKS_DEVICE = torch.ops.prim.device.default
_SIMPLE = frozenset(
    {
        *(bool, int, float, complex, str, type(None)),
        *(torch.device, torch.dtype, torch.layout, torch.memory_format),
    }
)
_NEW, _VIEW, _SAME = range(3)


@dataclass(frozen=True)
class _Result:
    """A tensor that an operator returns.

    Attributes:
        kind: New memory, a view of an argument's memory, or the argument itself.
        source: The argument, as an index into all tensors of the call.
        layout: Shape, strides, offset and dtype.
        device: The device.
    """

    kind: int
    source: int
    layout: tuple[Any, ...]
    device: torch.device


@dataclass(frozen=True)
class _Form:
    """How an operator is recorded.

    Attributes:
        target: The operator of its node: itself, or one with the same arguments in its place.
        sequence: The type of the sequence of its results; None for one result.
        results: The results.
    """

    target: OpOverload
    sequence: type | None
    results: tuple[_Result | None, ...]


class _Call:
    """The arguments of a call: as a key, as tensors, and as arguments of a node."""

    def __init__(self, tracer: Any, fake_mode: TraceMode, makes_views: bool) -> None:
        self._tracer = tracer
        self.makes_views = makes_views
        self.fake_mode = fake_mode
        self.key: list[Any] = []
        self.tensors: list[FakeTensor] = []
        self.layouts: list[tuple[Any, ...]] = []

    def read(self, values: Any) -> list[Any]:
        """Add values, and return them with nodes in the place of tensors.

        Raises:
            _UnknownValue: A value is not one that this file knows.
        """
        key, result = self.key, []
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                node = constant_or_node(self._tracer, value)
                if not isinstance(node, torch.fx.Node) or not is_plain(value, self.fake_mode):
                    raise _UnknownValue
                layout = layout_of(value)
                # (New memory does not depend on the place of an argument in its own.)
                key += (layout if self.makes_views else layout[:2], value.dtype, value.fake_device)
                self.tensors.append(value)
                self.layouts.append(layout)
                result.append(node)
            elif kind in _SIMPLE:
                key += (kind, value)  # True, 1 and 1.0 are equal, but their types differ
                result.append(value)
            elif kind is list or kind is tuple:
                key += (kind, len(value))
                result.append(kind(self.read(value)))
            else:
                raise _UnknownValue
        return result


class _UnknownValue(Exception):
    """An argument is not a plain one."""


class RepeatedOperators(TorchDispatchMode):
    """The mode that records what PyTorch's recorder has recorded before.

    Args:
        fake_mode: The mode of the trace's tensors.
    """

    def __init__(self, fake_mode: TraceMode) -> None:
        super().__init__()
        self._fake_mode = fake_mode
        self._forms: dict[Any, _Form | None] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # (its wrapper takes longer than the mode)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Record one operator."""
        if func is _ASKS_DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        kwargs = kwargs or {}
        tracer = current_tracer()
        if tracer is None or type(func) is not OpOverload:
            return func(*args, **kwargs)
        makes_views = func.is_view or func is _UNSAFE_VIEW
        call = _Call(tracer, self._fake_mode, makes_views)
        try:
            node_args = tuple(call.read(args))
            node_kwargs = dict(zip(kwargs, call.read(kwargs.values()), strict=True))
        except _UnknownValue:
            return func(*args, **kwargs)
        key = (func, torch.get_default_dtype(), *call.key, *kwargs)
        if key not in self._forms:
            last = last_node(tracer.graph)
            results = func(*args, **kwargs)
            node = last.next
            same = node.args == node_args and node.kwargs == node_kwargs
            self._forms[key] = _form(tracer, node, call, results) if same else None
            return results
        form = self._forms[key]
        if form is None:
            return func(*args, **kwargs)
        node = add_call(tracer.graph, form.target, node_args, node_kwargs)
        return self._repeat(form, tracer, node, call)

    def _repeat(self, form: _Form, tracer: Any, node: torch.fx.Node, call: _Call) -> Any:
        """Make the results of a node."""
        meta = copy_channel()
        made = [
            None if result is None else self._result(result, call, tracer)
            for result in form.results
        ]
        if form.sequence is None:
            value, seen = cast(tuple[torch.Tensor, torch.Tensor], made[0])
            node.meta |= meta | {"val": seen}
            track(tracer, value, node)
            return value
        node.meta |= meta | {"val": form.sequence(pair and pair[1] for pair in made)}
        for i, pair in enumerate(made):
            part = add_call(tracer.graph, operator.getitem, (node, i), {})
            part.meta |= copy_channel()
            if pair is not None:
                part.meta["val"] = pair[1]
                track(tracer, pair[0], part)
        return form.sequence(pair and pair[0] for pair in made)

    def _result(
        self, result: _Result, call: _Call, tracer: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a result, and the tensor that describes it in the graph."""
        if result.kind == _SAME:
            same = call.tensors[result.source]
            node: Any = constant_or_node(tracer, same)
            return same, node.meta["val"]
        shape, strides, _, dtype = result.layout
        if result.kind == _NEW:
            return self._fake_mode.new(shape, strides, dtype, result.device)
        return self._fake_mode.view(call.tensors[result.source], result.layout, result.device)


def _form(tracer: Any, node: torch.fx.Node, call: _Call, results: Any) -> _Form | None:
    """Return what an operator has returned; None if this file would not make the same."""
    if results is None:
        return None
    sequence = type(results) if type(results) in (tuple, list) else None
    values = results if sequence else (results,)
    parts = [node]
    if sequence:
        for i in range(len(values)):
            parts.append(parts[-1].next)
            if parts[-1].target is not operator.getitem or parts[-1].args != (node, i):
                return None
        del parts[0]
    if last_node(tracer.graph) is not (parts or [node])[-1]:
        return None
    if not isinstance(node.target, OpOverload):
        return None
    if schema_of(node.target).is_mutable and list(map(layout_of, call.tensors)) != call.layouts:
        return None  # it changes a shape
    memories: dict[int, int] = {}
    for i, one in enumerate(call.tensors):
        memories.setdefault(storage_key(one), i)
    found = [
        None if value is None else _found(tracer, value, part, call, memories)
        for value, part in zip(values, parts, strict=True)
    ]
    if any(
        value is not None and result is None for value, result in zip(values, found, strict=True)
    ):
        return None
    new = [v for v, r in zip(values, found, strict=True) if r is not None and r.kind == _NEW]
    if len(set(map(storage_key, new))) < len(new):
        return None  # results share memory
    return _Form(node.target, sequence, tuple(found))


def _found(
    tracer: Any, value: Any, node: torch.fx.Node, call: _Call, memories: dict[int, int]
) -> _Result | None:
    """Return the description of a result; None for one that this file would not make."""
    if type(value) is not FakeTensor or constant_or_node(tracer, value) is not node:
        return None
    layout, device = layout_of(value), value.fake_device
    for i, one in enumerate(call.tensors):
        if one is value:
            return _Result(_SAME, i, layout, device)
    if not is_plain(value, call.fake_mode) or value.requires_grad:
        return None
    source = memories.get(storage_key(value))
    if source is not None:
        return _Result(_VIEW, source, layout, device) if call.makes_views else None
    return None if value.storage_offset() else _Result(_NEW, -1, layout, device)
