"""What an iteration of a device loop finds of the gradients of the iteration before it.

The body is traced once, and gradients begin with nothing there. In PyTorch they begin with what the
iteration before has left, which ``zero_grad`` takes away. So the trace holds for all iterations if
gradients are taken away before they are used, or if none are left at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from popsim_torch.errors import Error

__all__ = ["LeftGradients"]


@dataclass(frozen=True)
class _Use:
    """Something that depends on what the iteration before has left of a gradient."""

    parameter: torch.Tensor
    name: str
    what: str
    zeros: bool


class LeftGradients:
    """Follows when gradients are taken away, and when they are used."""

    def __init__(self) -> None:
        # By identity of the traced parameters, which outlive this.
        self._cleared: set[int] = set()
        self._become_zeros: set[int] = set()
        self._zeros: dict[int, torch.Tensor] = {}
        self._lines: dict[int, str] = {}
        self._uses: list[_Use] = []

    def clear(self, parameter: torch.Tensor, *, to_none: bool) -> None:
        """Take a gradient away.

        Args:
            parameter: The traced one.
            to_none: Put None in its place, and not zeros.
        """
        if to_none:
            parameter.grad = None
            self._become_zeros.discard(id(parameter))
        elif parameter.grad is not None:
            parameter.grad = self._zeros[id(parameter)] = torch.zeros_like(parameter.grad)
        elif id(parameter) not in self._cleared:
            # None in the first iteration; zeros in others, if something is left.
            self._become_zeros.add(id(parameter))
        self._cleared.add(id(parameter))

    def replace(self, parameter: torch.Tensor) -> None:
        """Take note that user code has put another gradient, or None, in the place of one."""
        self._become_zeros.discard(id(parameter))
        self._cleared.add(id(parameter))

    def is_new(self, parameter: torch.Tensor) -> bool:
        """Whether a gradient has nothing of the iteration before."""
        return id(parameter) in self._cleared

    def add(self, parameter: torch.Tensor, where: str) -> None:
        """Take note that ``backward()`` adds to a gradient."""
        self._lines[id(parameter)] = where

    def use(self, parameter: torch.Tensor, name: str, what: str) -> None:
        """Take note that a gradient is used.

        Args:
            parameter: The traced one.
            name: Its name.
            what: What uses it, and where, for messages.
        """
        zeros = parameter.grad is None and id(parameter) in self._become_zeros
        if zeros or id(parameter) not in self._cleared:
            self._uses.append(_Use(parameter, name, what, zeros))

    def check(self) -> None:
        """Check at the end of an iteration that the next one goes like it.

        Raises:
            Error: A gradient would be left over.
        """
        for use in self._uses:
            if use.parameter.grad is None:
                continue
            if use.zeros:
                raise Error(
                    f"{use.what}: the gradient of '{use.name}' is None in the first iteration, and "
                    f"zeros in all others: backward(){self._line(use)} leaves one behind, and "
                    "zero_grad(set_to_none=False) makes zeros of it. Call zero_grad() without "
                    "set_to_none=False."
                )
            if id(use.parameter) not in self._cleared:
                raise Error(
                    f"{use.what}: the body never calls zero_grad(), so that gradients of "
                    f"'{use.name}' would add up over all iterations. Call optimizer.zero_grad() in "
                    "the body. To update every g-th iteration, pass gradient_accumulation=g "
                    "to repeat."
                )
            if use.parameter.grad is not self._zeros.get(id(use.parameter)):
                raise Error(
                    f"{use.what}: the gradient of '{use.name}' would contain what "
                    f"backward(){self._line(use)} has left in the iteration before. Call "
                    "zero_grad() of its optimizer or module in front of the first backward() of "
                    "the body."
                )

    def _line(self, use: _Use) -> str:
        return self._lines.get(id(use.parameter), "")
