"""Parsers that users register: they find the tensors in objects of a type."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch

from popsim_torch.errors import Error

__all__ = ["ICustomArgParser", "find_parser", "registerCustomArgParser", "registered_parsers"]


class ICustomArgParser(ABC):
    """Finds the tensors in objects of one type, and builds such objects with other tensors."""

    @abstractmethod
    def yieldTensors(self, struct: Any) -> Iterator[torch.Tensor]:
        """Yield the tensors of an object, always in the same order.

        Args:
            struct: An object of the registered type.
        """

    @abstractmethod
    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[torch.Tensor]) -> Any:
        """Return a new object like the original with other tensors.

        Args:
            original_structure: The object that was passed when the model was compiled.
            tensor_iterator: Yields the new tensors in the order of ``yieldTensors``.
        """


_parsers: dict[type[Any], ICustomArgParser] = {}


def registerCustomArgParser(custom_type: type[Any], parser: ICustomArgParser | None) -> None:
    """Let models take and return objects of a user-defined type.

    The parser is also used for derived types, unless they have their own parser.

    Args:
        custom_type: The type; an earlier parser of it is replaced.
        parser: The parser for its objects; ``None`` removes the parser of the type.

    Raises:
        Error: ``custom_type`` is not a type, or ``parser`` is not an :class:`ICustomArgParser`.
    """
    if not isinstance(custom_type, type):
        raise Error(f"registerCustomArgParser: {custom_type!r} is not a type.")
    if parser is None:
        _parsers.pop(custom_type, None)
    elif isinstance(parser, ICustomArgParser):
        _parsers[custom_type] = parser
    else:
        raise Error(
            f"registerCustomArgParser: the parser for {custom_type.__name__} must be an instance "
            f"of a class derived from ICustomArgParser, got {parser!r}."
        )


def registered_parsers() -> dict[type[Any], ICustomArgParser]:
    """Return the currently registered parsers, by type."""
    return dict(_parsers)


def find_parser(kind: type[Any]) -> ICustomArgParser | None:
    """Return the parser of a type or of one that it is derived from; None without any."""
    if kind in _parsers:
        return _parsers[kind]
    return next((parser for base, parser in _parsers.items() if issubclass(kind, base)), None)
