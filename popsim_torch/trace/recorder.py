"""Keeps the books while forward is traced: scopes, origins, losses, prints, gradient names."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
)
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from popsim_torch.errors import InternalError
from popsim_torch.ir import Origin
from popsim_torch.ops import PrintFormat
from popsim_torch.stages import StageAssigner
from popsim_torch.trace.device import DEVICE
from popsim_torch.trace.markers import PrintedTensor, mark
from popsim_torch.trace.origin import set_origin
from popsim_torch.trace.result import PrintRequest, TraceResult

_OWN_PATHS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
# Answered from a tensor's metadata: no operation on the device.
_METADATA = frozenset({"size", "dim", "numel", "stride", "is_floating_point", "is_complex", "type"})


def _user_line() -> str:
    """Return ``file:line`` of the innermost frame outside of torch and of this package."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_OWN_PATHS):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class Recorder:
    """Listens to function calls, module calls and the operations of ``popsim_torch.ops``.

    Args:
        module: The module being traced.
        stages: Tells the stage of what is called now.
        result: Filled with constants, prints and gradient marks.
        module_scopes: Put module paths into scopes.
    """

    def __init__(
        self, module: nn.Module, stages: StageAssigner, result: TraceResult, module_scopes: bool
    ) -> None:
        self._result = result
        self._stages = stages
        self._module_scopes = module_scopes
        self._paths = {
            id(child): name.replace(".", "/")
            for name, child in reversed(list(module.named_modules()))
        }
        self._scopes: list[str] = [""]
        self._origin = Origin()
        self._in_backward = False
        self._keys = itertools.count()
        self._known: dict[int, torch.Tensor] = {}
        self._constants: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        # Autograd nodes seen so far; kept, because their identity is what counts.
        self._seen: set[Any] = set()
        self._hooked: set[tuple[Any, int]] = set()
        self.losses: list[torch.Tensor] = []

    def start(self, state: Mapping[str, torch.Tensor]) -> None:
        """Begin a trace in which parameters and buffers are these traced tensors, by name."""
        host = {**self._result.parameters, **self._result.buffers}
        self._known = {id(tensor): state[name] for name, tensor in host.items()}
        for name in self._result.parameters:
            if state[name].requires_grad:
                key = next(self._keys)
                self._result.parameter_of[key] = name
                self._mark_gradient(state[name], key)

    def close(self) -> None:
        """Forget the trace.

        Autograd's nodes hold hooks that hold this object, where the garbage collector cannot see
        it: what is kept here would be kept for ever.
        """
        for kept in (self._seen, self._hooked, self.losses, self._known, self._constants):
            kept.clear()
        del self._result

    @staticmethod
    def node_of(tensor: torch.Tensor) -> torch.fx.Node:
        """Return the node that a traced tensor is the result of."""
        mode = get_proxy_mode()
        slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
        if slot is None:
            raise InternalError("trace: a tensor of the traced model has no node in the graph")
        node: torch.fx.Node = slot.proxy.node
        return node

    # Function calls (FunctionListener)

    def known(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the traced tensor for a parameter or buffer of the model, else ``tensor``."""
        return self._known.get(id(tensor), tensor)

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a traced tensor for the data that a host tensor has now."""
        key = (id(tensor), tensor._version)
        if key not in self._constants:
            with disable_proxy_modes_tracing(), unset_fake_temporarily():
                data = tensor.detach().clone(memory_format=torch.contiguous_format)
            self._result.constants.append(data)
            self._set_origin("Constant")
            traced = torch.ops.popsim.constant(
                list(tensor.shape),
                tensor.dtype,
                len(self._result.constants) - 1,
                DEVICE,
            )
            # The host tensor is kept: its id must not become another one's.
            self._constants[key] = (tensor, traced)
        return self._constants[key][1]

    def before_call(self, function: Callable[..., Any]) -> None:
        """Take note of where the nodes made next come from."""
        if getattr(function, "__name__", "") not in _METADATA:
            self._set_origin()

    def after_call(self, result: torch.Tensor) -> None:
        """Ask for the gradient of a differentiable result, and follow its way back."""
        if not result.requires_grad or result.grad_fn is None:
            return
        place = (result.grad_fn, result.output_nr)
        if place in self._hooked:
            return
        self._hooked.add(place)
        key = next(self._keys)
        self._result.forward_of[key] = self.node_of(result)
        self._mark_gradient(result, key)
        self._follow(result.grad_fn)

    def mark_loss(self, loss: torch.Tensor) -> None:
        """Take note of a loss."""
        self.losses.append(loss)

    # Operations of user code (OpListener)

    def print_tensor(
        self, tensor: torch.Tensor, title: str, print_gradient: bool, text_format: PrintFormat
    ) -> torch.Tensor:
        """Return ``tensor``, printed at run time."""
        self._set_origin("PrintTensor")
        tensor = self.known(tensor)
        key = next(self._keys)
        self._result.prints[key] = PrintRequest(title, None, text_format)
        gradient_key = None
        if print_gradient:
            gradient_key = next(self._keys)
            self._result.prints[gradient_key] = PrintRequest(title, key, text_format)
        result: torch.Tensor = PrintedTensor.apply(tensor, key, gradient_key)  # type: ignore[no-untyped-call]
        self.after_call(result)
        return result

    def identity_loss(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        """Return the reduced tensor, marked as a loss."""
        self._set_origin("IdentityLoss")
        with torch._C.DisableTorchFunction():
            reduced = (
                tensor.view_as(tensor) if reduction == "none" else getattr(tensor, reduction)()
            )
        self.after_call(reduced)
        self.mark_loss(reduced)
        return reduced

    def checkpoint(self, tensor: torch.Tensor) -> None:
        """Take note of a value to keep for the backward pass; data of the host is kept anyway."""
        tensor = self.known(tensor)
        if isinstance(tensor, FakeTensor):
            self._result.checkpoints.append(self.node_of(tensor))

    @contextmanager
    def name_scope(self, name: str) -> Iterator[None]:
        """Put ``name`` behind the current scope."""
        outer = self._scopes[-1]
        self._scopes.append(f"{outer}/{name}" if outer else name)
        try:
            yield
        finally:
            self._scopes.pop()

    # Modules

    @contextmanager
    def following_modules(self) -> Iterator[None]:
        """Keep the scope that of the modules being called."""
        if not self._module_scopes:
            yield
            return
        called: list[nn.Module] = []

        def enter(module: nn.Module, _args: object) -> None:
            if id(module) in self._paths:
                caller = self._paths[id(called[-1])] if called else ""
                called.append(module)
                self._scopes.append(self._inner_scope(caller, self._paths[id(module)]))

        def leave(module: nn.Module, _args: object, _result: object) -> None:
            if called and called[-1] is module:
                called.pop()
                self._scopes.pop()

        handles = (
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _inner_scope(self, caller: str, path: str) -> str:
        """Return the scope of a module called where the current scope is, from ``caller``."""
        scope = self._scopes[-1]
        if path == caller:
            return scope
        if caller and not path.startswith(f"{caller}/"):
            return path
        step = path[len(caller) :].lstrip("/")
        return f"{scope}/{step}" if scope else step

    # Backward

    @contextmanager
    def backward_of(self, loss: torch.Tensor) -> Iterator[None]:
        """Run a backward pass that starts at ``loss``."""
        self._follow(loss.grad_fn)
        set_origin(replace(self._origin, backward=True, op_type=None))
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False

    def _set_origin(self, op_type: str | None = None) -> None:
        self._origin = Origin(
            self._scopes[-1], self._stages.current_stage(), False, op_type, _user_line()
        )
        set_origin(self._origin)

    @staticmethod
    def _mark_gradient(tensor: torch.Tensor, key: int) -> None:
        tensor.register_hook(  # type: ignore[no-untyped-call]
            lambda gradient: None if gradient is None else mark(gradient, key)
        )

    def _follow(self, node: Any) -> None:
        """Let the backward of the current call carry its origin.

        Gradients that forward itself computes (``torch.autograd.grad``) belong to forward.
        """
        origin = replace(self._origin, backward=True, op_type=None)

        def before(_gradients: object) -> None:
            if self._in_backward:
                set_origin(origin)

        todo = [node]
        while todo:
            current = todo.pop()
            if current is None or current in self._seen or hasattr(current, "variable"):
                continue
            self._seen.add(current)
            current.register_prehook(before)
            todo.extend(following for following, _ in current.next_functions)
