"""Tensors that a program offers by name: they are computed only if they are requested.

Code that can make a tensor *offers* it: a name, and a function that makes the tensor. The function
is called only if the name is requested, so a program without requests has no such tensors.
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
    """Collects the offers of a program, and knows which of them are requested.

    Attributes:
        anchors: The requests.
        names: The offered names, as keys.
    """

    anchors: tuple[AnchorRequest, ...] = ()
    names: dict[str, None] = field(default_factory=dict)

    @cached_property
    def _asked(self) -> frozenset[str]:
        """The requested names, in every spelling."""
        return frozenset(name for one in self.anchors for name in spellings(one.long_name))

    def asked(self, name: str) -> bool:
        """Return whether a name is requested."""
        return name in self._asked

    def add(self, graph: Graph, name: str, make: Callable[[], Tensor]) -> Tensor | None:
        """Offer a tensor.

        Args:
            graph: Receives the name, if it is requested.
            name: The name of the tensor.
            make: Adds the ops that compute the tensor to the program, and returns it.

        Returns:
            The tensor; None if it is not requested.
        """
        self.names[name] = None
        if name not in self._asked:
            return None
        tensor = make()
        graph.set_name(tensor, name)
        return tensor

    def of_body(self, body: Graph) -> dict[str, Tensor]:
        """Offer the named tensors of a body; return those that the op around it must return."""
        self.names.update(dict.fromkeys(body.names))
        return {name: body.tensors[i] for name, i in body.names.items() if name in self._asked}


def find_name(asked: str, known: Mapping[str, object]) -> str | None:
    """Return the known name that a user's name stands for; None if there is none."""
    return next((name for name in spellings(asked) if name in known), None)
