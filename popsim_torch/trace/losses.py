"""Finds the losses, and the loss that training starts from."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from torch.fx.node import map_aggregate

from popsim_torch import logs
from popsim_torch.errors import Error, NoLossError
from popsim_torch.private_torch.modules import BACKWARD_HOOK_NODE
from popsim_torch.private_torch.operators import OpOverload
from popsim_torch.trace.books.leaves import leaves_of
from popsim_torch.trace.graph.markers import MARK, PRINT
from popsim_torch.trace.graph.traced_tensors import find_node, host_computation
from popsim_torch.trace.user_backward import is_user_function

_LOSS_NAMES = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding_loss",
    "cross_entropy",
    "ctc_loss",
    "gaussian_nll_loss",
    "hinge_embedding_loss",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "margin_ranking_loss",
    "mse_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "nll_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "triplet_margin_with_distance_loss",
)
LOSS_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(getattr(F, name) for name in _LOSS_NAMES)
"""The functions of ``torch.nn.functional`` whose result is a loss."""


def _feeds(loss: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether ``other`` is computed from ``loss``."""
    goal, start = _origin(loss), _origin(other)
    if loss is other or goal is None or start is None:
        return False
    seen = {start}
    todo = [start]
    while todo:
        node = todo.pop()
        if node is goal:
            return start is not goal
        for following in _operands(node):
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return False


def _origin(loss: torch.Tensor) -> Any:
    """Return autograd's node of a tensor, or its node in the recorded graph without gradient."""
    return loss.grad_fn if loss.grad_fn is not None else find_node(loss)


def _operands(node: Any) -> Sequence[Any]:
    if isinstance(node, torch.fx.Node):
        return node.all_input_nodes
    return [following for following, _ in node.next_functions]


def behind_hooks(
    loss: torch.Tensor, outputs: Sequence[torch.Tensor], hooked: Collection[Any] = ()
) -> torch.Tensor:
    """Return the output that code of the user for gradients makes of the loss, or the loss itself.

    Such code is a backward hook of a module, a hook of a tensor, and a
    ``torch.autograd.Function``. The output has the value of the loss, or differs by a constant.

    Args:
        loss: The loss that training starts from.
        outputs: The outputs of forward.
        hooked: Autograd's nodes of the tensors with hooks of the user.
    """
    for output in outputs:
        node: Any = output.grad_fn
        if node is None or not isinstance(node, BACKWARD_HOOK_NODE):
            continue
        if node.next_functions[output.output_nr] == (loss.grad_fn, loss.output_nr):
            return output
    if any(_origin(output) is _origin(loss) for output in outputs):
        return loss
    behind = [number for number in _numbers(outputs) if _feeds(loss, number)]
    changed = [number for number in behind if _changes_gradient(loss, number, hooked)]
    if not changed or any(leaves_of(number, beside=loss) for number in behind):
        return loss
    moving = [number for number in behind if _moves_with(loss, number)]
    is_only = len({_origin(number) for number in moving}) == 1
    return moving[0] if is_only and any(moving[0] is number for number in changed) else loss


def _numbers(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the outputs that are one number each, with a gradient."""
    return [output for output in outputs if output.grad_fn is not None and output.numel() == 1]


def _changes_gradient(loss: torch.Tensor, number: torch.Tensor, hooked: Collection[Any]) -> bool:
    """Return whether a gradient passes code of the user between a number and the loss."""
    todo: list[Any] = [number.grad_fn]
    seen = {loss.grad_fn, None}
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in hooked or is_user_function(node) or isinstance(node, BACKWARD_HOOK_NODE):
            return True
        todo += _operands(node)
    return False


def warn_of_numbers_behind(
    loss: torch.Tensor, outputs: Sequence[torch.Tensor], hooked: Collection[Any] = ()
) -> None:
    """Warn of an output that eager PyTorch would be trained on, with other gradients.

    This is a sum of the loss and of terms with parameters, or a number that changes by another
    amount than the loss or is not computed from it, if the loss itself is not returned.

    Args:
        loss: The loss that training starts from; it has a gradient.
        outputs: The outputs of forward.
        hooked: As for :func:`behind_hooks`.
    """
    numbers = _numbers(outputs)
    behind = [number for number in numbers if _feeds(loss, number)]
    if any(leaves_of(number, beside=loss) for number in behind):
        logs.python.warning(
            "trainingModel: forward returns a number that is computed from the loss and from "
            "other terms with parameters. Training starts at the loss function, as in "
            "PopTorch, so the other terms have no gradient. To train on the sum, return "
            'poptorch.identity_loss(loss + term, reduction="sum").'
        )
        return
    is_returned = any(_origin(output) is _origin(loss) for output in outputs)
    if numbers and not behind and not is_returned:
        logs.python.warning(
            "trainingModel: forward returns a number with a gradient, which is not computed from "
            "the loss%s, and not the loss itself. Training starts at the loss function, as in "
            "PopTorch. To train on what forward returns, return "
            'poptorch.identity_loss(number, reduction="sum").',
            " (detach() cuts it off)" if _is_detached(loss, numbers) else "",
        )
    same = (number for number in behind if not _changes_gradient(loss, number, hooked))
    if behind and not is_returned and not any(_moves_with(loss, number) for number in same):
        logs.python.warning(
            "trainingModel: forward returns a number that is computed from the loss, and not the "
            "loss itself. Training starts at the loss function, as in PopTorch, so what is "
            "behind it, such as the factor in loss / 4, does not change the gradients. To train on "
            'what forward returns, return poptorch.identity_loss(number, reduction="sum").'
        )


def _is_detached(loss: torch.Tensor, numbers: Sequence[torch.Tensor]) -> bool:
    """Return whether numbers are computed from the loss, and their gradients are not."""
    goal, todo = find_node(loss), [find_node(number) for number in numbers]
    seen: set[torch.fx.Node] = set()
    while goal is not None and todo:
        node = todo.pop()
        if node is goal:
            return True
        if node is not None and node not in seen and node > goal:
            seen.add(node)
            todo += node.all_input_nodes
    return False


def _moves_with(loss: torch.Tensor, number: torch.Tensor) -> bool:
    """Return whether a number that is computed from the loss always changes by the same amount."""
    start, end = find_node(loss), find_node(number)
    if start is None or end is None or number.is_complex():
        return False
    try:
        with host_computation():
            values = [_computed_from(start, given, end) for given in (1.0, 2.0, 4.0)]
    except (RuntimeError, IndexError):  # a call takes none of these numbers, such as an index
        return False
    if any(value is None for value in values):
        return False
    one, two, four = (value for value in values if value is not None)
    return math.isclose(two - one, 1, rel_tol=1e-2) and math.isclose(four - two, 2, rel_tol=1e-2)


def _computed_from(start: torch.fx.Node, given: float, end: torch.fx.Node) -> float | None:
    """Return what a node gives if another one gives a number; None if it needs a third one."""
    like: torch.Tensor = start.meta["val"]
    values = {start: torch.full(like.shape, given, dtype=like.dtype, device="cpu")}

    def argument(value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return values[value]
        return torch.device("cpu") if isinstance(value, torch.device) else value

    todo = [end]
    while todo:
        node = todo[-1]
        missing = [operand for operand in node.all_input_nodes if operand not in values]
        if node in values:
            todo.pop()
        elif node.op != "call_function" or node < start:
            return None
        elif missing:
            todo += missing
        elif node.target in (MARK, PRINT):  # identities
            values[node] = values[node.all_input_nodes[0]]
        elif not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
            return None
        elif torch.Tag.nondeterministic_seeded in node.target.tags:
            return None  # (it would also take numbers from the host's generator)
        else:
            function: Any = node.target
            args: Any = map_aggregate(node.args, argument)
            kwargs: Any = map_aggregate(node.kwargs, argument)
            values[node] = function(*args, **kwargs)
    return float(values[end])


def _is_returned(losses: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> bool:
    """Return whether forward returns a loss, or something that is computed from one."""
    return any(
        _origin(output) is _origin(loss) or _feeds(loss, output)
        for output in outputs
        for loss in losses
    )


def _combinations(
    losses: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the outputs that are one number each and are computed from all losses."""
    return [number for number in _numbers(outputs) if all(_feeds(loss, number) for loss in losses)]


def find_final_loss(
    losses: list[torch.Tensor],
    differentiated: Sequence[torch.Tensor] = (),
    left_out: Sequence[str] = (),
    outputs: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Return the one loss that no other loss is computed from.

    Losses without gradient count only if there are no others: then nothing is trained. Of several
    losses, the one that forward returns, with its gradient, is the loss; or else the one number
    that forward computes from all of them and returns: their sum.

    Args:
        losses: Results of loss functions and of ``identity_loss``, in the order of their calls.
        differentiated: Tensors whose gradients forward has computed itself: a loss among them,
            or one that they are computed from, counts only if there is no other one.
        left_out: Arguments of forward that are None: forward may need them to compute a loss.
        outputs: The outputs of forward.

    Raises:
        NoLossError: There is no loss.
        Error: There are several, or it is not a scalar, or complex.
    """
    if not losses:
        given = " and ".join(f"{name}=None" for name in left_out)
        raise NoLossError(
            "trainingModel: Couldn't find a loss in graph. "
            + (f"forward was called with {given}: were the labels left out? " if given else "")
            + "A training model's forward has to call "
            "a loss function of torch.nn, or poptorch.identity_loss on the tensor to minimise."
        )
    candidates = [loss for loss in losses if loss.grad_fn is not None] or losses
    final = [loss for loss in candidates if not any(_feeds(loss, other) for other in candidates)]
    outer = [
        loss
        for loss in final
        if not any(loss is other or _feeds(loss, other) for other in differentiated)
    ]
    if not outer and outputs and not _is_returned(final, outputs):
        raise NoLossError(
            "trainingModel: the only loss function that forward calls is one whose gradient it "
            "computes itself (torch.autograd.grad), and forward does not return that loss. To "
            "train on what it returns, wrap the tensor to minimise: "
            'poptorch.identity_loss(x, reduction="sum").'
        )
    final = outer or final
    if len({_origin(loss) for loss in final}) > 1:
        # A metric, detached or not returned, has no gradient in eager PyTorch either.
        returned = [loss for loss in final if _is_returned([loss], outputs)]
        final = returned if len({_origin(loss) for loss in returned}) == 1 else final
    if len({_origin(loss) for loss in final}) > 1:
        combined = _combinations(final, outputs)
        if len({_origin(output) for output in combined}) != 1:
            raise Error(
                f"trainingModel: Multiple independent losses found in graph ({len(final)} of "
                "them). There has to be one final loss: return their sum from forward, or "
                'wrap it, poptorch.identity_loss(loss1 + loss2, reduction="sum"). To return one '
                "only as a metric, return its detach()."
            )
        final = combined
    loss = final[-1]
    if loss.numel() != 1:
        raise Error(
            f"trainingModel: the loss must be a scalar tensor, got shape {tuple(loss.shape)}. "
            'Use reduction="mean" or "sum", or poptorch.identity_loss.'
        )
    if loss.is_complex():
        raise Error(
            "trainingModel: the loss is a complex number, of which none is the smallest. Take its "
            "absolute value, loss.abs(), or its real part, before poptorch.identity_loss."
        )
    return loss
