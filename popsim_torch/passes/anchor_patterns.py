"""Replaces anchors with a pattern by an anchor for each tensor that the pattern means."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from popsim_torch.anchors import AnchorRequest, anchor_of_group
from popsim_torch.errors import Error
from popsim_torch.ir import Program, tensor_infos
from popsim_torch.ir.offers import Offers
from popsim_torch.ir.selecting import choose, find_name
from popsim_torch.tensors import Selection, TensorInfo

__all__ = ["expand_patterns"]


def expand_patterns(program: Program) -> tuple[AnchorRequest, ...]:
    """Return the requests of a program, each for one tensor; keep them in its offers.

    ``program.groups`` gets the names of the tensors of each pattern.

    Args:
        program: A program that is complete except for its returns, changed in place.

    Raises:
        Error: An anchor has the short name of a tensor of a pattern.
    """
    found: list[AnchorRequest] = []
    infos: list[TensorInfo] | None = None
    for request in program.offers.anchors:
        pattern = _pattern(program, request)
        if pattern is None:
            found.append(request)
            continue
        if infos is None:
            infos = tensor_infos(program)
        names = _recorded(program, choose(pattern, infos).tensors)
        program.groups[request.short_name] = names
        found += [
            replace(request, short_name=anchor_of_group(request.short_name, name), long_name=name)
            for name in names
        ]
    _check_distinct(found)
    program.offers = Offers(tuple(found), program.offers.names)
    return program.offers.anchors


def _pattern(program: Program, request: AnchorRequest) -> Selection | None:
    """Return the pattern of a request; None if it means one tensor by its name."""
    name = request.long_name
    if isinstance(name, str) and find_name(name, program.graph.names) is not None:
        return None
    return request.pattern


def _recorded(program: Program, chosen: Iterable[TensorInfo]) -> tuple[str, ...]:
    """Return the names of the chosen tensors that can be recorded.

    The others are in bodies without a fixed number of iterations.
    """
    return tuple(one.name for one in chosen if one.name in program.graph.names)


def _check_distinct(requests: list[AnchorRequest]) -> None:
    seen: set[str] = set()
    for one in requests:
        if one.short_name in seen:
            raise Error(
                f"Options.anchorTensor: '{one.short_name}' is the short name of an anchor, and of "
                "a tensor of an anchor with a pattern. Choose another short name for one of them."
            )
        seen.add(one.short_name)
