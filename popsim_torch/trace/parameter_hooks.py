"""Hooks on the user's parameters; post-accumulate hooks cannot be called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from popsim_torch import logs
from popsim_torch.private_torch.tensors import gradient_hooks, has_hooks_behind

__all__ = ["ParameterHooks"]

_MOST_NAMES = 3


class ParameterHooks:
    """The hooks of a module's parameters, read before the trace.

    Args:
        parameters: The host's parameters, by name. During the trace they behave like the traced
            ones.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._of_gradients = {
            name: gradient_hooks(parameter) for name, parameter in parameters.items()
        }
        self._without_effect = {
            name for name, parameter in parameters.items() if has_hooks_behind(parameter)
        }

    def attach(self, traced: Mapping[str, torch.Tensor]) -> None:
        """Let hooks see and change the gradients of the traced parameters.

        Args:
            traced: The traced parameters, by name.
        """
        for name, hooks in self._of_gradients.items():
            for hook in hooks if traced[name].requires_grad else ():
                traced[name].register_hook(hook)  # type: ignore[no-untyped-call]

    def warn(self, traced: Mapping[str, torch.Tensor], trained: Iterable[str]) -> None:
        """Warn of hooks that are never called.

        Args:
            traced: The traced parameters by name; forward may have added hooks to them.
            trained: The names of the parameters that have a gradient.
        """
        names = [
            f"'{name}'"
            for name in trained
            if name in self._without_effect or has_hooks_behind(traced[name])
        ]
        if not names:
            return
        shown, others = names[:_MOST_NAMES], len(names) - _MOST_NAMES
        logs.python.warning(
            "register_post_accumulate_grad_hook has no effect on the parameter%s %s%s: the device "
            "accumulates gradients, and calls no Python there. Use parameter.register_hook, which "
            "sees and changes the gradients of each micro-batch, or poptorch.OutfeedOptimizer, "
            "which sends accumulated gradients to the host.",
            "" if len(names) == 1 else "s",
            ", ".join(shown),
            f" and {others} more" if others > 0 else "",
        )
