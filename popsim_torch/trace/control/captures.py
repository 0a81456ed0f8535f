"""The tensors in a recorded body that replace tensors from outside.

The body has its own gradients: they end at the tensors that it reads, and do not continue to the
tensors that those were computed from. So operators in the body get tensors for the same nodes, but
without a history. Changes in place in the body also affect only these: the tensors outside, and
their gradients, do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx

from popsim_torch.dtypes import is_continuous
from popsim_torch.private_torch.modes import DisableTorchFunction
from popsim_torch.private_torch.proxies import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    track_tensor_tree,
)
from popsim_torch.trace.books.call_origins import CallOrigins
from popsim_torch.trace.books.stand_ins import StandIns
from popsim_torch.trace.graph.origin import current_origin, set_origin
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
    """A tensor that may be changed in place, with the gradient of a leaf, which may not."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, node: torch.fx.Node) -> torch.Tensor:
        """Return a tensor for ``node``."""
        return _standing_for(node, leaf)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient of the leaf."""
        return gradient, None


class StandIn:
    """A tensor without a history, for a node.

    Args:
        node: The node.
        like: A tensor with this shape, dtype and layout.
        differentiable: Whether it has a gradient.

    Attributes:
        node: See above.
        leaf: Has the gradient of ``tensor`` before any change.
        tensor: The tensor that operators get.
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
    """Return a tensor without a node."""
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
    """The tensors from outside that a body reads, and their replacements in the body.

    Args:
        last: The last node before the body.
        enclosing: The captures of the enclosing body.
    """

    def __init__(self, last: torch.fx.Node, enclosing: Captures | None) -> None:
        self._last = last
        self._enclosing = enclosing
        # By id; the tensors are kept alive, so that no id is used twice.
        self._found: dict[int, tuple[torch.Tensor, StandIn]] = {}
        self._outside: dict[int, torch.Tensor] = {}

    def inside(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the replacement of a tensor in the body; the tensor itself if the body made it."""
        if id(tensor) in self._outside:
            return tensor
        if self._enclosing is not None:
            tensor = self._enclosing.inside(tensor)
        if id(tensor) not in self._found:
            # Attributes of a tensor are functions too; without this scope they would call this
            # again.
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
        """Return the user's tensor for a tensor of the body; any other tensor as it is."""
        tensor = self._outside.get(id(tensor), tensor)
        return tensor if self._enclosing is None else self._enclosing.outside(tensor)

    def differentiable(self) -> list[tuple[torch.Tensor, StandIn]]:
        """Return the tensors that have a gradient, each with its replacement."""
        return [(outer, own) for outer, own in self._found.values() if own.leaf.requires_grad]

    def _node_outside(self, tensor: torch.Tensor) -> torch.fx.Node | None:
        """Return the node of a tensor that was made before the body and may be changed."""
        if not is_traced(tensor) or is_functorch_wrapped_tensor(tensor):
            return None
        node = find_node(tensor) if is_continuous(tensor.dtype) else None
        return None if node is None or self._last < node else node


class BodyScopes:
    """The replacements of tensors in the bodies of loops and branches, which may be nested.

    Args:
        stand_ins: The traced tensors of host tensors outside of all bodies.
        origins: Knows the origin of the recorded nodes.
    """

    def __init__(self, stand_ins: StandIns, origins: CallOrigins) -> None:
        self._stand_ins = stand_ins
        self._origins = origins
        self._captures: Captures | None = None

    @contextmanager
    def capturing(self, last: torch.fx.Node, differentiates: bool) -> Iterator[Captures]:
        """Use replacements for tensors from outside in this scope, with gradients if wanted."""
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

        In a body it is the replacement of the tensor.
        """
        return self._inside(self._stand_ins.known(tensor))

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a traced tensor for the present data of a host tensor."""
        calling, origin = self._origins.current, current_origin()
        self._origins.begin("Constant")
        try:
            return self._inside(self._stand_ins.constant(tensor))
        finally:
            self._origins.return_to(calling)
            set_origin(origin)  # in a backward pass it is that of a gradient

    def traced(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the traced tensor for a host tensor, and any other tensor as it is."""
        tensor = self.known(tensor)
        return self.constant(tensor) if is_host_tensor(tensor) else tensor

    def seen_outside(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the user's tensor for a tensor of a body; any other tensor as it is."""
        return tensor if self._captures is None else self._captures.outside(tensor)

    def state_of(self, node: torch.fx.Node) -> torch.Tensor | None:
        """Return the parameter or buffer of a node; None if the node is something else."""
        state = self._stand_ins.state_of(node)
        return None if state is None else self.known(state)

    def _inside(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._captures is None else self._captures.inside(tensor)


@contextmanager
def _arguments_of_functions(inside: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Pass the replacements of its arguments to each ``torch.autograd.Function`` of the user.

    A mode does not see calls of its ``apply``.
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
