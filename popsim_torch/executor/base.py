"""``HasModel`` and ``HasForward``: minimal interfaces of an executor and of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

from torch import nn

__all__ = ["HasForward", "HasModel"]

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class HasForward(Protocol[P, R_co]):
    """Describes a module to type checkers: the arguments and the result of its forward."""

    @property
    def forward(self) -> Callable[P, R_co]:
        """The function that a call of the module runs."""


class HasModel:
    """An object that runs a model of the user and keeps the model in an attribute."""

    _user_model: nn.Module
