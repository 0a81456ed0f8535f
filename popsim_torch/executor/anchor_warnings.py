"""Warnings about the anchors of a program: patterns that match nothing, and too many bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable

from popsim_torch import logs
from popsim_torch.anchors import AnchorRequest, anchor_of_group
from popsim_torch.dtypes import returned_dtype
from popsim_torch.errors import listed_names
from popsim_torch.ir import Program, tensor_infos
from popsim_torch.ir.selecting import choose, near_names
from popsim_torch.tensors.selections import words_of

__all__ = ["MOST_BYTES", "warn_of_anchors"]

MOST_BYTES = 2**30
"""A warning tells of anchors that take more memory than this in a call (bytes)."""


def warn_of_anchors(program: Program, requests: Iterable[AnchorRequest]) -> None:
    """Warn of patterns that match nothing, and of anchors that take more than 1 GiB per call.

    Args:
        program: The program with its returns.
        requests: The requests of the options.
    """
    patterns = [one for one in requests if one.short_name in program.groups]
    infos = tensor_infos(program) if patterns else []
    known = [one.name for one in infos]
    for request in patterns:
        pattern = request.pattern
        assert pattern is not None  # (only a pattern has a group)
        chosen = choose(pattern, infos)
        for part in chosen.idle:
            logs.python.warning(
                "%s: %s matches none of the %d tensors of this graph. Near names: %s.",
                *(request.call, words_of(part), len(known)),
                ", ".join(map(repr, near_names(part, known))),
            )
        recorded = set(program.groups[request.short_name])
        left = [one.name for one in chosen.tensors if one.name not in recorded]
        if left:
            logs.python.warning(
                "%s: %s cannot be recorded: the body of a loop that makes no iteration, or a "
                "number of iterations that depends on a value, computes %s.",
                *(request.call, listed_names(left), "it" if len(left) == 1 else "them"),
            )
    _warn_of_bytes(program)


def _warn_of_bytes(program: Program) -> None:
    tensors = program.graph.tensors
    sizes = {
        short_name: math.prod(one.shape) * returned_dtype(tensors[one.tensor].dtype).itemsize
        for short_name, one in program.anchors.items()
    }
    total = sum(sizes.values())
    if total <= MOST_BYTES:
        return
    of_groups = {
        short_name: (len(names), sum(sizes[anchor_of_group(short_name, name)] for name in names))
        for short_name, names in program.groups.items()
    }
    largest = max(of_groups, key=lambda name: of_groups[name][1], default=None)
    hint = (
        f" The pattern of '{largest}' matches {of_groups[largest][0]:,} tensors, with "
        f"{of_groups[largest][1]:,} bytes."
        if largest is not None
        else ""
    )
    logs.python.warning(
        "Options.anchorTensor: the %s anchored tensors take %s bytes in each call (more than "
        "1 GiB).%s Choose fewer tensors, or OutputMode.Final or EveryN.",
        *(f"{len(sizes):,}", f"{total:,}", hint),
    )
