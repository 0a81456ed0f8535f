"""Hooks on the user's parameters: of gradients, and behind their accumulation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from popsim_torch.errors import Error
from popsim_torch.private_torch.modes import DisableTorchFunction
from popsim_torch.private_torch.tensors import gradient_hooks, hooks_behind, version_of
from popsim_torch.stages import StageAssigner
from popsim_torch.trace.books.accumulated import ACCUMULATED, KEEP_ACCUMULATED
from popsim_torch.trace.graph.origin import origin_of, set_origin, user_line
from popsim_torch.trace.graph.traced_tensors import node_of

__all__ = ["HookObserver", "ParameterHooks"]

_Hook = Callable[[torch.Tensor], Any]


class HookObserver(Protocol):
    """The part of the tracer that runs hooks as parts of the trace."""

    def hook(
        self, function: Callable[..., Any], tensor: torch.Tensor | None = None
    ) -> Callable[..., Any]:
        """Return a gradient hook of a tensor in which operations of ``popsim_torch`` work."""


class ParameterHooks:
    """The hooks of a module's parameters, read before the trace.

    Args:
        parameters: The host's parameters, by name. During the trace they behave like the traced
            ones.
        observer: Runs hooks as parts of the trace.
        stages: Knows the number of pipeline stages behind forward.
        micro_batches: The micro-batches whose gradients the device adds up for one update.
        mean: Whether the update divides their sum by their number.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        observer: HookObserver,
        stages: StageAssigner,
        micro_batches: int,
        mean: bool,
    ) -> None:
        self._parameters = parameters
        self._observer = observer
        self._stages = stages
        self._micro_batches = micro_batches
        self._divisor = micro_batches if mean else 1
        self._of_gradients = {
            name: gradient_hooks(parameter) for name, parameter in parameters.items()
        }
        self._behind = {name: hooks_behind(parameter) for name, parameter in parameters.items()}

    def attach(self, traced: Mapping[str, torch.Tensor]) -> None:
        """Let hooks see and change the gradients of the traced parameters.

        Args:
            traced: The traced parameters, by name.
        """
        for name, hooks in self._of_gradients.items():
            for hook in hooks if traced[name].requires_grad else ():
                traced[name].register_hook(hook)  # type: ignore[no-untyped-call]

    def has_behind(self, name: str, traced: torch.Tensor) -> bool:
        """Return whether a parameter has hooks behind the accumulation of its gradient.

        Args:
            name: The name of the parameter.
            traced: The traced parameter; forward may have added hooks to it.
        """
        return bool(self._behind[name] or hooks_behind(traced))

    def accumulate(
        self, name: str, traced: torch.Tensor, gradient: torch.Tensor
    ) -> torch.Tensor | None:
        """Run the hooks behind the accumulation of the gradient of one micro-batch.

        Args:
            name: The name of the parameter.
            traced: The traced parameter, without a gradient.
            gradient: The gradient of the micro-batch.

        Returns:
            What the update gets: the gradient, or what the accumulator holds. None if the hooks
            have removed it.
        """
        key = list(self._parameters).index(name)
        several = self._micro_batches > 1
        set_origin(origin_of(node_of(gradient)))
        with torch.no_grad(), DisableTorchFunction():
            total = ACCUMULATED(gradient, key) if several else gradient
            # (not the memory of a gradient that other parameters have, too)
            seen = total / self._divisor if self._divisor > 1 else total.clone()
        traced.grad = seen
        version = version_of(seen)
        try:
            self.run_behind(name, traced, gradient)
            found, traced.grad = traced.grad, None
        except BaseException:
            traced.grad = None
            raise
        if found is seen and version_of(seen) == version:
            return total
        if found is None or not several:
            return found
        with torch.no_grad(), DisableTorchFunction():
            kept: torch.Tensor = KEEP_ACCUMULATED(found * self._divisor, key)
            return kept

    def run_in_loop(self, name: str, traced: torch.Tensor, gradient: torch.Tensor) -> None:
        """Run the hooks behind the accumulation that ``backward()`` in a device loop does.

        Args:
            name: The name of the parameter.
            traced: The traced parameter, with the accumulated gradient.
            gradient: The gradient that was added last.
        """
        if traced.grad is not None and self.has_behind(name, traced):
            if traced.grad is gradient:  # perhaps the memory of other gradients
                with torch.no_grad(), DisableTorchFunction():
                    traced.grad = gradient.clone()
            self.run_behind(name, traced, gradient)

    def run_behind(self, name: str, traced: torch.Tensor, gradient: torch.Tensor) -> None:
        """Call the hooks that a parameter has behind the accumulation of its gradient.

        Args:
            name: The name of the parameter.
            traced: The traced parameter, with a gradient.
            gradient: The gradient of which the hooks are a part.
        """
        parameter, version = self._parameters[name], version_of(traced)
        for hook in (*self._behind[name], *hooks_behind(traced)):
            with torch.no_grad(), _without_steps(name):
                result = self._observer.hook(hook, gradient)(parameter)
            if result is not None:
                raise RuntimeError("Tensor post accumulate grad hooks should return None.")
        if version_of(traced) != version and self._stages.num_stages > 1:
            raise Error(
                f"A hook of register_post_accumulate_grad_hook changes the parameter '{name}'. "
                f"With {self._stages.num_stages} pipeline stages, other micro-batches use the "
                "parameter at that time: weights change only at the end, by the optimizer. Change "
                "parameter.grad instead, or put the model on one stage."
            )


@contextmanager
def _without_steps(name: str) -> Iterator[None]:
    """Refuse that a hook steps an optimizer."""
    thread = threading.get_ident()  # PyTorch calls the hooks of optimizers in all threads

    def refuse(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if threading.get_ident() == thread:
            raise Error(
                f"A hook of register_post_accumulate_grad_hook on the parameter '{name}'"
                f"{user_line(' at ')} steps the optimizer {type(optimizer).__name__}. On the "
                "device, the optimizer of the model updates the weights, after the backward pass. "
                "Remove the hook, and pass one optimizer with all parameters to trainingModel; "
                "parameters with different settings get a group each."
            )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
