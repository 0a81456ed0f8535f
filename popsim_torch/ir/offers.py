"""What of a program can be seen by name: what it has, and what it has only where that is asked for.

Who knows how a tensor is made *offers* it: a name, and the function that makes it. The function is
called if the name is asked for, so a program that nobody looks into has nothing of the kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from popsim_torch.anchors import AnchorRequest
from popsim_torch.ir.graph import Graph, Tensor
from popsim_torch.ir.names import spellings

__all__ = ["Offers", "find_name"]


@dataclass
class Offers:
    """Takes the offers of a program, and knows which of them are asked for.

    Attributes:
        anchors: What is asked for.
        names: What was offered: names as keys.
    """

    anchors: tuple[AnchorRequest, ...] = ()
    names: dict[str, None] = field(default_factory=dict)

    @cached_property
    def _asked(self) -> frozenset[str]:
        """The names that are asked for, in every spelling."""
        return frozenset(name for one in self.anchors for name in spellings(one.long_name))

    def asked(self, name: str) -> bool:
        """Whether a name is asked for."""
        return name in self._asked

    def add(self, graph: Graph, name: str, make: Callable[[], Tensor]) -> Tensor | None:
        """Offer a tensor.

        Args:
            graph: Gets the name, if that is asked for.
            name: Of the tensor.
            make: Adds what computes it to the program, and returns it.

        Returns:
            The tensor; None if nobody asks for it.
        """
        self.names[name] = None
        if name not in self._asked:
            return None
        tensor = make()
        graph.set_name(tensor, name)
        return tensor

    def of_body(self, body: Graph) -> dict[str, Tensor]:
        """Offer the named tensors of a body; return those that the op around it has to give out."""
        self.names.update(dict.fromkeys(body.names))
        return {name: body.tensors[i] for name, i in body.names.items() if name in self._asked}


def find_name(asked: str, known: Mapping[str, object]) -> str | None:
    """Return which of the known names is meant by one that a user wrote; None if none is."""
    return next((name for name in spellings(asked) if name in known), None)
