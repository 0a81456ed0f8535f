"""Follows gradients during the trace: each gets a key, and a mark where it is complete."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from popsim_torch.private_torch.autocasts import without_autocast
from popsim_torch.private_torch.modes import DisableTorchFunction
from popsim_torch.trace.books.call_origins import CallOrigins
from popsim_torch.trace.books.changed_in_place import explained
from popsim_torch.trace.books.gradient_sums import place_sums
from popsim_torch.trace.books.gradient_uses import watch_uses
from popsim_torch.trace.books.result import TraceResult
from popsim_torch.trace.graph.bodies import with_bodies
from popsim_torch.trace.graph.markers import MARK, PRINT, mark
from popsim_torch.trace.graph.origin import note_gradient, note_kept, set_origin, user_line
from popsim_torch.trace.graph.traced_tensors import (
    current_graph,
    find_node,
    is_functorch_wrapped_tensor,
    node_of,
    unwrapped,
)

__all__ = ["Gradients"]


def _place(tensor: torch.Tensor) -> tuple[Any, int]:
    """Return what identifies a differentiable tensor: a leaf itself has no node."""
    return (id(tensor) if tensor.grad_fn is None else tensor.grad_fn), tensor.output_nr


def _refuses(node: Any) -> bool:
    """Return whether a node of autograd is there to raise an error (``once_differentiable``)."""
    return type(node).__name__ == "Error"


def _check_refusals(root: Any) -> None:
    """Run the nodes that raise errors; a backward pass to the parameters would leave them out."""
    todo, seen = [root], {root}
    while todo:
        node = todo.pop()
        if _refuses(node):
            node(None)
        new = {following for following, _ in node.next_functions} - seen - {None}
        seen |= new
        todo += new


class Gradients:
    """The gradients of a trace, and the losses that they start from.

    Args:
        result: Receives the meaning of each key, and the nodes of losses.
        origins: Knows the origin of the recorded nodes.

    Attributes:
        losses: The results of loss functions.
        differentiated: The tensors whose gradients forward computes itself.
        with_hooks: Autograd's nodes of the tensors that have hooks of the user.
    """

    def __init__(self, result: TraceResult, origins: CallOrigins) -> None:
        self._result = result
        self._origins = origins
        self._graph: torch.fx.Graph | None = None
        self._keys = itertools.count()
        # Autograd nodes seen so far; kept alive, because they are compared by id.
        self._seen: set[Any] = set()
        self._hooked: set[tuple[Any, int]] = set()
        # The hooks that name gradients, by the place of the tensor, and the functions to register.
        self._naming: dict[tuple[Any, int], tuple[Any, Callable[..., Any]]] = {}
        # Prints with gradient: the tensor, and the tensor that replaces it after the print.
        self._printed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._depth_of_bodies = 0
        self._has_refusal = False
        self.losses: list[torch.Tensor] = []
        self.differentiated: list[torch.Tensor] = []
        self.with_hooks: set[Any] = set()

    def start(self, state: Mapping[str, torch.Tensor]) -> None:
        """Begin a trace in which parameters are these traced tensors, by name."""
        self._graph = current_graph()
        for name in self._result.parameters:
            if state[name].requires_grad:
                key = self.new_key()
                self._result.parameter_of[key] = name
                self._mark(state[name], key)

    def close(self) -> None:
        """Forget the trace; hooks hold this object."""
        for seen in (self._seen, self._hooked, self._naming, self._printed, self.losses):
            seen.clear()
        self.differentiated.clear()
        self.with_hooks.clear()
        del self._result, self._graph

    def new_key(self) -> int:
        """Return a key that no other gradient or print has."""
        return next(self._keys)

    def after_call(self, result: torch.Tensor) -> None:
        """Name the gradient of a differentiable result, and follow its backward nodes."""
        if not torch.is_grad_enabled():
            return  # a view that was changed without gradient would refuse to be asked for its node
        result = unwrapped(result)
        if not result.requires_grad or result.grad_fn is None:
            return
        if current_graph() is not self._graph:
            return  # torch.func.linearize traces it separately
        place = (result.grad_fn, result.output_nr)
        if place in self._hooked:
            return
        self._hooked.add(place)
        key = self.new_key()
        self._mark(result, key, self._origins.current.stage)
        if self._depth_of_bodies:  # its gradient belongs to the body; its node will be cut out
            note_gradient(node_of(result), key)
            return
        self._result.forward_of[key] = node_of(result)
        self._follow(result.grad_fn)

    def hook_added(self, tensor: torch.Tensor) -> None:
        """Name the gradient after a new hook of the user has changed it."""
        place = _place(unwrapped(tensor))
        self.with_hooks.add(unwrapped(tensor).grad_fn)
        if place in self._naming:
            handle, named = self._naming[place]
            handle.remove()
            self._register(unwrapped(tensor), named)

    def changed(self, parameter: str, gradient: torch.Tensor) -> torch.Tensor:
        """Name the gradient of a parameter after hooks behind the backward pass; return it.

        Args:
            parameter: The name of the parameter.
            gradient: The gradient after the hooks.
        """
        keys = [key for key, name in self._result.parameter_of.items() if name == parameter]
        before = [
            node
            for node in (() if self._graph is None else self._graph.nodes)
            if node.target is MARK and node.args[1] in keys
        ]
        for node in before:
            source: Any = node.args[0]
            node.replace_all_uses_with(source)
            node.graph.erase_node(node)
        return mark(gradient, keys[0])

    # Losses.

    def mark_loss(self, loss: torch.Tensor) -> None:
        """Record a loss, except inside of a transform of ``torch.func``."""
        if not is_functorch_wrapped_tensor(loss):
            self.losses.append(loss)
            node = find_node(loss)
            if node is not None:
                self._result.losses.append(node)

    def mark_differentiated(self, outputs: Sequence[torch.Tensor]) -> None:
        """Record tensors whose gradients forward computes itself."""
        self.differentiated.extend(outputs)

    def mark_printed(self, tensor: torch.Tensor, result: torch.Tensor) -> None:
        """Record a print with gradient, and the tensor that it returns."""
        self._printed.append((tensor, result))

    def behind_prints(self, loss: torch.Tensor, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the result of the last print of a loss: the gradient starts from there.

        A print is ignored if its result is not used.
        """
        nodes = {find_node(output) for output in outputs}
        for tensor, result in self._printed:
            node = find_node(result)
            if tensor is loss and node is not None and (node.users or node in nodes):
                loss = result
        return loss

    # Bodies.

    @property
    def is_inside_of_body(self) -> bool:
        """Whether the body of a loop or branch inside of forward is being traced."""
        return self._depth_of_bodies > 0

    @contextmanager
    def inside_of_body(self) -> Iterator[None]:
        """Record no losses and gradients in this scope: they do not belong to the model."""
        lists: list[list[Any]] = [self.losses, self.differentiated]
        lists += [self._result.losses, self._result.checkpoints]
        lengths = [len(items) for items in lists]
        self._depth_of_bodies += 1
        try:
            yield
        finally:
            self._depth_of_bodies -= 1
            for items, length in zip(lists, lengths, strict=True):
                del items[length:]

    @contextmanager
    def gradient_of_body(self) -> Iterator[None]:
        """Record that the nodes made in this scope belong to the gradient of a body."""
        origins = self._origins
        set_origin(origins.backward())
        before, origins.in_backward = origins.in_backward, True
        try:
            with without_autocast():  # backward is outside of the regions of forward
                yield
        except RuntimeError as error:
            located = explained(error, user_line(excludes=("contextlib.py",)))
            if located is None:
                raise
            raise located from error
        finally:
            origins.in_backward = before
            set_origin(origins.current)

    # Backward.

    @contextmanager
    def backward_of(self, loss: torch.Tensor) -> Iterator[None]:
        """Run a backward pass that starts at ``loss``."""
        self._keep_prints_of(loss)
        self._follow(loss.grad_fn)
        if self._has_refusal:
            _check_refusals(loss.grad_fn)
        watch_uses(loss.grad_fn, self._note_use)
        set_origin(self._origins.backward())
        self._origins.in_backward = True
        try:
            yield
        finally:
            self._origins.in_backward = False

    def _keep_prints_of(self, loss: torch.Tensor) -> None:
        """Keep the prints that a loss depends on, even if nothing reads the loss itself."""
        node, controls = find_node(loss), self._result.controls
        if node is None or not self._result.prints:
            return
        todo, seen = [node], {node}
        while todo:
            node = todo.pop()
            if any(inner.target is PRINT for inner in with_bodies([node], controls)):
                note_kept(node)
            new = [one for one in node.all_input_nodes if one not in seen]
            seen.update(new)
            todo += new

    def _note_use(self, position: int, operand: int, gradient: torch.Tensor) -> None:
        """Record the gradient that one use of a tensor contributes."""
        node = find_node(gradient) if self._origins.in_backward else None
        if node is not None:
            self._result.partial_gradients[position, operand] = node

    def _mark(self, tensor: torch.Tensor, key: int, stage: int | None = None) -> None:
        """Name the gradient of a tensor, unless forward itself computes that gradient.

        Args:
            tensor: The tensor.
            key: The key of its gradient.
            stage: The stage that computes the tensor; None for a parameter.
        """
        origins = self._origins

        def placed(gradient: torch.Tensor | None) -> None:
            node = None if gradient is None else find_node(gradient)
            if node is not None and stage is not None and origins.in_backward:
                place_sums(node, stage, origins.position)

        def named(gradient: torch.Tensor | None) -> torch.Tensor | None:
            if gradient is None or not origins.in_backward:
                return None
            return mark(gradient, key)

        if stage is not None:
            with DisableTorchFunction():
                tensor.register_hook(placed)  # type: ignore[no-untyped-call]
        self._register(tensor, named)

    def _register(self, tensor: torch.Tensor, named: Callable[..., Any]) -> None:
        """Add the hook that names a gradient, behind all hooks that the tensor has."""
        with DisableTorchFunction():  # this is not a hook of the user
            handle = tensor.register_hook(named)  # type: ignore[no-untyped-call]
        self._naming[_place(tensor)] = handle, named

    def _follow(self, node: Any) -> None:
        """Give the backward nodes of the current call its origin.

        Gradients that forward itself computes (``torch.autograd.grad``) belong to forward.
        """
        origins, origin = self._origins, self._origins.backward()

        def before(_gradients: object) -> None:
            if origins.in_backward:
                set_origin(origin)

        todo = [node]
        while todo:
            current = todo.pop()
            if current is None or current in self._seen or hasattr(current, "variable"):
                continue
            self._seen.add(current)
            self._has_refusal |= _refuses(current)
            current.register_prehook(before)
            todo.extend(following for following, _ in current.next_functions)
