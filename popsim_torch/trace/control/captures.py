"""What stands in a body that is recorded for tensors from outside.

The body has gradients of its own: what it reads is where they end, not a step on the way to what
the tensors from outside were computed of. So operators called in it are given tensors that stand
for the same nodes and have no past. Changes in place, too, are theirs: the tensors outside, and
their gradients, stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx

from popsim_torch.private_torch.modes import DisableTorchFunction
from popsim_torch.private_torch.proxies import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    track_tensor_tree,
)
from popsim_torch.trace.books.call_origins import CallOrigins
from popsim_torch.trace.books.stand_ins import StandIns
from popsim_torch.trace.graph.traced_tensors import (
    find_node,
    is_functorch_wrapped_tensor,
    is_host_tensor,
    is_traced,
    outside_transforms,
)
from popsim_torch.typed_torch import apply

__all__ = ["BodyScopes", "Captures", "StandIn"]


class _FromLeaf(torch.autograd.Function):
    """A tensor that may be changed in place, and has the gradient of a leaf, which may not."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, node: torch.fx.Node) -> torch.Tensor:
        """Return a tensor that stands for ``node``."""
        return _standing_for(node, leaf)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient of the leaf."""
        return gradient, None


class StandIn:
    """A tensor without a past, for a node.

    Args:
        node: What it stands for.
        like: A tensor of this shape, element type and layout.
        differentiable: Whether it has a gradient.

    Attributes:
        node: As given.
        leaf: Its gradient is that of ``tensor`` before any change.
        tensor: What operators are given.
    """

    def __init__(self, node: torch.fx.Node, like: torch.Tensor, differentiable: bool) -> None:
        self.node = node
        self.leaf: torch.Tensor
        self.tensor: torch.Tensor
        with outside_transforms(), DisableTorchFunction(), torch.enable_grad():
            if differentiable:
                self.leaf = _empty_like(like).requires_grad_()
                self.tensor = apply(_FromLeaf, self.leaf, node)
            else:
                self.leaf = self.tensor = _standing_for(node, like)


def _empty_like(like: torch.Tensor) -> torch.Tensor:
    """Return a tensor that no node stands for."""
    with disable_proxy_modes_tracing():
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


def _standing_for(node: torch.fx.Node, like: torch.Tensor) -> torch.Tensor:
    tensor = _empty_like(like)
    mode: Any = get_proxy_mode()
    proxy = torch.fx.Proxy(node, mode.tracer)
    with disable_proxy_modes_tracing():
        track_tensor_tree(tensor, proxy, constant=None, tracer=mode.tracer)
    return tensor


class Captures:
    """Tensors from outside that a body reads, and what stands for them in it.

    Args:
        last: The last node in front of the body.
        enclosing: Those of the body that this one is in.
    """

    def __init__(self, last: torch.fx.Node, enclosing: Captures | None) -> None:
        self._last = last
        self._enclosing = enclosing
        # By identity; the tensors are kept, so that no later one has the identity of another.
        self._found: dict[int, tuple[torch.Tensor, StandIn]] = {}
        self._outside: dict[int, torch.Tensor] = {}

    def inside(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what stands in the body for a tensor; itself if it was made there."""
        if id(tensor) in self._outside:
            return tensor
        if self._enclosing is not None:
            tensor = self._enclosing.inside(tensor)
        if id(tensor) not in self._found:
            # Attributes of a tensor are functions, too, whose argument would come here once more.
            with DisableTorchFunction():
                node = self._node_outside(tensor)
                if node is None:
                    return tensor
                own = StandIn(node, tensor, tensor.requires_grad)
            self._found[id(tensor)] = (tensor, own)
            self._outside[id(own.tensor)] = tensor
        _, stand_in = self._found[id(tensor)]
        return stand_in.tensor

    def outside(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the user's tensor that one of the body stands for; any other one as it is."""
        tensor = self._outside.get(id(tensor), tensor)
        return tensor if self._enclosing is None else self._enclosing.outside(tensor)

    def differentiable(self) -> list[tuple[torch.Tensor, StandIn]]:
        """Return the tensors that have a gradient, each with what stood for it."""
        return [(outer, own) for outer, own in self._found.values() if own.leaf.requires_grad]

    def _node_outside(self, tensor: torch.Tensor) -> torch.fx.Node | None:
        """Return the node of a tensor that was made in front of the body and may be changed."""
        if not is_traced(tensor) or is_functorch_wrapped_tensor(tensor):
            return None
        node = find_node(tensor) if tensor.dtype.is_floating_point else None
        return None if node is None or self._last < node else node


class BodyScopes:
    """What a tensor is inside of the bodies of loops and branches, one within the other.

    Args:
        stand_ins: What stands for tensors of the host outside of all bodies.
        origins: Tells where what is recorded comes from.
    """

    def __init__(self, stand_ins: StandIns, origins: CallOrigins) -> None:
        self._stand_ins = stand_ins
        self._origins = origins
        self._captures: Captures | None = None

    @contextmanager
    def capturing(self, last: torch.fx.Node, differentiates: bool) -> Iterator[Captures]:
        """Let what stands for tensors from outside be used in this scope, if it has gradients."""
        enclosing = self._captures
        captures = Captures(last, enclosing)
        if not differentiates:
            yield captures
            return
        self._captures = captures
        try:
            with _arguments_of_functions(self._inside):
                yield captures
        finally:
            self._captures = enclosing

    def known(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the traced tensor for a parameter or buffer of the model, else ``tensor``.

        In a body it is what stands there for the tensor.
        """
        return self._inside(self._stand_ins.known(tensor))

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a traced tensor for the data that a host tensor has now."""
        calling = self._origins.current
        self._origins.begin("Constant")
        try:
            return self._inside(self._stand_ins.constant(tensor))
        finally:
            self._origins.return_to(calling)

    def traced(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the traced tensor for one of the host, and any other one as it is."""
        tensor = self.known(tensor)
        return self.constant(tensor) if is_host_tensor(tensor) else tensor

    def seen_outside(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the user's tensor that one of a body stands for; any other one as it is."""
        return tensor if self._captures is None else self._captures.outside(tensor)

    def state_of(self, node: torch.fx.Node) -> torch.Tensor | None:
        """Return the parameter or buffer that a node stands for, if it does."""
        state = self._stand_ins.state_of(node)
        return None if state is None else self.known(state)

    def _inside(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._captures is None else self._captures.inside(tensor)


@contextmanager
def _arguments_of_functions(inside: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Give each ``torch.autograd.Function`` of the user what stands for its arguments.

    Its ``apply`` is no function that a mode sees.
    """
    Function: Any = torch.autograd.Function
    original = Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        given = (inside(value) if isinstance(value, torch.Tensor) else value for value in args)
        return original.__func__(cls, *given, **kwargs)

    Function.apply = classmethod(apply)
    try:
        yield
    finally:
        Function.apply = original
