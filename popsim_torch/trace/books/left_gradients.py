"""Checks which gradients an iteration of a device loop leaves to the next iteration.

The body is traced once, and starts without gradients. In PyTorch an iteration starts with the
gradients of the iteration before, until ``zero_grad`` clears them. So the trace is valid for all
iterations if gradients are cleared before they are used, or if none are left at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from popsim_torch.errors import Error

__all__ = ["LeftGradients"]


@dataclass(frozen=True)
class _Use:
    """A use that depends on the gradient left by the iteration before."""

    parameter: torch.Tensor
    name: str
    what: str
    zeros: bool


class LeftGradients:
    """Records when gradients are cleared, and when they are used."""

    def __init__(self) -> None:
        # The ids of traced parameters, which live longer than this object.
        self._cleared: set[int] = set()
        self._become_zeros: set[int] = set()
        self._zeros: dict[int, torch.Tensor] = {}
        self._lines: dict[int, str] = {}
        self._uses: list[_Use] = []

    def clear(self, parameter: torch.Tensor, *, to_none: bool) -> None:
        """Clear a gradient.

        Args:
            parameter: The traced parameter.
            to_none: Whether to replace it by None instead of zeros.
        """
        if to_none:
            parameter.grad = None
            self._become_zeros.discard(id(parameter))
        elif parameter.grad is not None:
            parameter.grad = self._zeros[id(parameter)] = torch.zeros_like(parameter.grad)
        elif id(parameter) not in self._cleared:
            # None in the first iteration; zeros in the others, if a gradient is left.
            self._become_zeros.add(id(parameter))
        self._cleared.add(id(parameter))

    def replace(self, parameter: torch.Tensor) -> None:
        """Record that user code has replaced a gradient by another one, or by None."""
        self._become_zeros.discard(id(parameter))
        self._cleared.add(id(parameter))

    def is_new(self, parameter: torch.Tensor) -> bool:
        """Return whether a gradient has no part from the iteration before."""
        return id(parameter) in self._cleared

    def add(self, parameter: torch.Tensor, where: str) -> None:
        """Record that ``backward()`` adds to a gradient."""
        self._lines[id(parameter)] = where

    def use(self, parameter: torch.Tensor, name: str, what: str) -> None:
        """Record that a gradient is used.

        Args:
            parameter: The traced parameter.
            name: The name of the parameter.
            what: A description of the use and its place, for messages.
        """
        zeros = parameter.grad is None and id(parameter) in self._become_zeros
        if zeros or id(parameter) not in self._cleared:
            self._uses.append(_Use(parameter, name, what, zeros))

    def check(self) -> None:
        """Check at the end of an iteration that the next one behaves the same.

        Raises:
            Error: A gradient would be left for the next iteration.
        """
        for use in self._uses:
            if use.parameter.grad is None:
                continue
            if use.zeros:
                raise Error(
                    f"{use.what}: the gradient of '{use.name}' is None in the first iteration, and "
                    f"zeros in all others: backward(){self._line(use)} leaves a gradient, and "
                    "zero_grad(set_to_none=False) replaces it by zeros. Call zero_grad() without "
                    "set_to_none=False."
                )
            if id(use.parameter) not in self._cleared:
                raise Error(
                    f"{use.what}: the body never calls zero_grad(), so gradients of "
                    f"'{use.name}' would add up over all iterations. Call optimizer.zero_grad() in "
                    "the body. To update every g-th iteration, pass gradient_accumulation=g "
                    "to repeat."
                )
            if use.parameter.grad is not self._zeros.get(id(use.parameter)):
                raise Error(
                    f"{use.what}: the gradient of '{use.name}' would contain the gradient that "
                    f"backward(){self._line(use)} has left in the iteration before. Call "
                    "zero_grad() of its optimizer or module before the first backward() of "
                    "the body."
                )

    def _line(self, use: _Use) -> str:
        return self._lines.get(id(use.parameter), "")
