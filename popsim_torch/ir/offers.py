"""Tensors that a program offers by name: they are computed only if they are requested.

Code that can make a tensor *offers* it: a name, and a function that makes the tensor. The function
is called only if the name is requested, so a program without requests has no such tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from popsim_torch.anchors import AnchorRequest
from popsim_torch.ir.graph import Graph, Tensor
from popsim_torch.ir.names import spellings
from popsim_torch.ir.selecting import find_name, may_take
from popsim_torch.tensors import Selection

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
        asked = [one.long_name for one in self.anchors if isinstance(one.long_name, str)]
        return frozenset(spelt for name in asked for spelt in spellings(name))

    def asked_by_name(self, name: str) -> bool:
        """Return whether a name is requested as it is, not by a pattern."""
        return name in self._asked

    def asked(self, name: str) -> bool:
        """Return whether a name is requested, by itself or by a pattern."""
        return name in self._asked or any(may_take(one, name) for one in self._patterns)

    @cached_property
    def _patterns(self) -> tuple[Selection, ...]:
        found = (one.pattern for one in self.anchors)
        return tuple(one for one in found if one is not None)

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
        if not self.asked(name):
            return None
        tensor = make()
        graph.set_name(tensor, name)
        return tensor

    def of_body(self, body: Graph) -> dict[str, Tensor]:
        """Offer the named tensors of a body; return those that the op around it must return."""
        self.names.update(dict.fromkeys(body.names))
        return {name: body.tensors[i] for name, i in body.names.items() if self.asked(name)}
