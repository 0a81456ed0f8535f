"""Copies of modules that share everything except their attributes."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import nn
from torch.nn.utils import parametrize

__all__ = ["shallow_copy"]

_Module = TypeVar("_Module", bound=nn.Module)


def shallow_copy(module: _Module) -> _Module:
    """Return a module with the same parameters, buffers and sub-modules, but own attributes.

    Args:
        module: A module. Parametrized ones refuse ``copy.copy``, because they refuse to be pickled.
    """
    if not parametrize.is_parametrized(module):
        return copy.copy(module)
    duplicate = type(module).__new__(type(module))
    vars(duplicate).update(vars(module))
    return duplicate
