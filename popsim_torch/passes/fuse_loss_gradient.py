"""Fuses the gradients of a loss over classes and of the log-softmax before it.

The gradient of the log-probabilities is zero except for one class of each sample. If only the
gradient of a log-softmax reads it, one op computes both, and the zeros are never written. The
values are equal to the last bit: the op rounds between the two steps like the two ops.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from popsim_torch.ir import Graph, Op
from popsim_torch.passes.patterns import Match, OpPattern, Pattern, Rewrite, rewrite, whole

__all__ = ["REWRITES", "fuse_loss_gradient"]


def fuse_loss_gradient(graph: Graph) -> int:
    """Fuse ``nll_loss_grad`` ops into ``softmax_grad`` ops, in place; see ``rewrite``."""
    return rewrite(graph, REWRITES)


def _is_over_classes(_match: Match, op: Op) -> bool:
    return bool(op.attributes["log"]) and op.attributes["axis"] == 1


def _fits(match: Match) -> bool:
    softmax, loss = match.ops["softmax"], match.ops["loss"]
    seen = match.tensor(softmax.inputs[0])
    return (
        seen.shape == match.root(seen.id).shape
        and match.run_together("softmax", "loss")
        and loss.attributes["dtype"] == softmax.attributes["dtype"]
    )


def _joined(match: Match) -> Mapping[str, Op]:
    softmax, loss = match.ops["softmax"], match.ops["loss"]
    attributes = {name: loss.attributes[name] for name in ("reduction", "ignore_index", "classes")}
    joined = replace(
        softmax,
        kind="cross_entropy_grad",
        inputs=[*loss.inputs, softmax.inputs[1]],
        attributes={**attributes, "dtype": softmax.attributes["dtype"]},
    )
    return {"softmax": joined}


_GRADIENTS = Pattern(
    seed=OpPattern("softmax", "softmax_grad", {0: whole("gradient")}, where=_is_over_classes),
    others=[OpPattern("loss", "nll_loss_grad", output="gradient")],
    inner=["gradient"],
    where=_fits,
)

REWRITES = (
    Rewrite(
        "cross_entropy_grad",
        "The gradients of ``nll_loss`` and of the log-softmax below it are one op, and the zeros "
        "between them are never written.",
        _GRADIENTS,
        _joined,
    ),
)
