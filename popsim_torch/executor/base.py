"""What an executor is to code that only looks for the user's model."""

from __future__ import annotations

from torch import nn

__all__ = ["HasModel"]


class HasModel:
    """Something that runs a model of the user's, which is its attribute."""

    _user_model: nn.Module
