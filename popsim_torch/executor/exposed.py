"""``Exposed``: methods that an object has from its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

__all__ = ["Exposed"]

P = ParamSpec("P")
R = TypeVar("R")


class Exposed(Generic[P, R]):
    """A method of a part, as a method of the whole.

    Signature and docstring are those of the part's method.

    Args:
        part: The attribute of the whole that has the part.
        method: The method, as the part's class has it.
    """

    def __init__(self, part: str, method: Callable[Concatenate[Any, P], R]) -> None:
        self._part = part
        self._method = method
        self.__doc__ = method.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> Callable[Concatenate[Any, P], R]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Callable[P, R]: ...
    def __get__(self, instance: object | None, owner: type) -> Any:
        if instance is None:
            return self._method
        return getattr(getattr(instance, self._part), self._method.__name__)
