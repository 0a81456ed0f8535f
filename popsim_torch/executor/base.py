"""What an executor is to code that only looks for the user's model, and a model to an executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

from torch import nn

__all__ = ["HasForward", "HasModel"]

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class HasForward(Protocol[P, R_co]):
    """A module, to type checkers: what its forward takes and returns."""

    @property
    def forward(self) -> Callable[P, R_co]:
        """What a call of the module runs."""


class HasModel:
    """Something that runs a model of the user's, which is its attribute."""

    _user_model: nn.Module
