"""``Attribute``: marks the ops of a part of ``forward`` for the back end."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar, Token
from types import MappingProxyType, TracebackType
from typing import Any

from popsim_torch.errors import UsageTypeError

__all__ = ["Attribute", "accessAttributes"]

Marks = Mapping[str, Mapping[str, Any]]

_active: ContextVar[Marks] = ContextVar("popsim_torch_attributes", default=MappingProxyType({}))


class Attribute:
    """Mark the ops inside a ``with`` statement for the back end; the marks have no effect.

    Nested statements add their marks. When a statement ends, only its own marks end.

    Args:
        **attributes: The marks of each attribute, as a dict whose keys are strings.

    Raises:
        UsageTypeError: An attribute is not a dict, or has a key that is not a string.

    Example:
        ::

            with poptorch.Attribute(__outline={"layer": "embedding"}):
                x = self.embedding(x)
    """

    def __init__(self, **attributes: Mapping[str, Any]) -> None:
        for name, marks in attributes.items():
            if not isinstance(marks, Mapping) or not all(isinstance(key, str) for key in marks):
                raise UsageTypeError(
                    f"Attribute({name}={marks!r}): pass a dict whose keys are strings."
                )
        self._attributes = {name: dict(marks) for name, marks in attributes.items()}
        self._tokens: list[Token[Marks]] = []

    def __enter__(self) -> None:
        outer = _active.get()
        inner = {name: {**outer.get(name, {}), **m} for name, m in self._attributes.items()}
        self._tokens.append(_active.set({**outer, **inner}))

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _active.reset(self._tokens.pop())


def accessAttributes(name: str) -> dict[str, Any]:
    """Return the marks that an op would get at this point, as a new dictionary.

    Args:
        name: The attribute, a keyword of :class:`Attribute`. If it has no marks, the result is
            empty.
    """
    return dict(_active.get().get(name, {}))
