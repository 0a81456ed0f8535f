"""Loops and branches that stay loops and branches in the program.

Python's own ``for`` and ``if`` run once, while the model is traced: a loop is unrolled, and only
one side of a branch is recorded. The functions below record the body of a loop or both sides of a
branch, and the program repeats or chooses them at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from popsim_torch.errors import Error, UsageValueError
from popsim_torch.ops import op_listener

__all__ = ["cond", "for_loop"]


def for_loop(
    count: int, body: Callable[..., Any], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Repeat a function of tensors: the results of an iteration are the arguments of the next.

    Python code in ``body`` runs once, when the model is compiled. The body may read parameters,
    buffers and other tensors of the model, call modules, print tensors, draw random numbers (new
    ones in each iteration) and contain other loops and branches. It gets copies of ``inputs``: if
    it changes its arguments in place, the caller's tensors stay the same. Changes of buffers and
    parameters are permanent. Changes of other tensors from outside last until the iteration ends.
    In training the loop is differentiated: the values at the start of each iteration are kept, and
    the backward pass computes the others again.

    Outside of a model that is being compiled the body is called once, whatever ``count`` is.

    Args:
        count: The number of iterations; 0 or more, and less than 2**63.
        body: Takes as many tensors as there are ``inputs``. Returns a list or tuple of as many
            tensors, with the same shapes and dtypes; a single tensor may be returned without a
            list.
        inputs: The arguments of the first iteration: a list or tuple of tensors.

    Returns:
        The results of the last iteration, always as a list.

    Raises:
        UsageValueError: ``inputs`` is not a list of tensors, or ``count`` is not a number of
            iterations.
        Error: The results of the body do not have the number, shapes and dtypes of its arguments.
    """
    _require_list("poptorch.for_loop", "inputs", inputs)
    for position, value in enumerate(inputs):
        if not isinstance(value, torch.Tensor):
            raise UsageValueError(
                f"poptorch.for_loop: the object of inputs at index {position} is not torch.tensor, "
                f"but a {type(value).__name__}."
            )
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < 2**63:
        raise UsageValueError(
            f"poptorch.for_loop: count must be a Python int, 0 or more and less than 2**63, and is "
            f"{count!r}. How often a loop runs is fixed when the model is compiled."
        )
    listener = op_listener.get()
    if listener is not None:
        return listener.for_loop(count, body, list(inputs))
    return _as_list("poptorch.for_loop", body(*inputs))


def cond(
    condition: torch.Tensor,
    then_body: Callable[..., Any],
    then_inps: Sequence[Any],
    else_body: Callable[..., Any],
    else_inps: Sequence[Any],
) -> list[torch.Tensor]:
    """Call one of two functions, chosen by a tensor when the program runs.

    Both functions are traced, each with its own arguments; the program runs one of them. The rules
    for the body of :func:`for_loop` apply to both. In training the branch is differentiated.

    Args:
        condition: A boolean tensor of one value; the model may compute it.
        then_body: Called if the condition is true. Returns a tensor, or a list or tuple of tensors.
        then_inps: A list with the arguments of ``then_body``; may be empty.
        else_body: Called otherwise. Returns as many tensors, of the same shapes and dtypes.
        else_inps: A list with the arguments of ``else_body``.

    Returns:
        The results of the function that was called, always as a list.

    Raises:
        UsageValueError: Arguments are not given as lists.
        Error: ``condition`` is not one boolean, or the results of the two functions differ in
            number, shape or dtype.
    """
    _require_list("poptorch.cond", "then_inps", then_inps)
    _require_list("poptorch.cond", "else_inps", else_inps)
    listener = op_listener.get()
    if listener is not None:
        return listener.cond(condition, (then_body, list(then_inps)), (else_body, list(else_inps)))
    chosen = then_body(*then_inps) if condition else else_body(*else_inps)
    return _as_list("poptorch.cond", chosen)


def _require_list(function: str, name: str, value: object) -> None:
    if not isinstance(value, (list, tuple)):
        raise UsageValueError(
            f"{function}: Object is not list: {name} must be a list of tensors, got a "
            f"{type(value).__name__}."
        )


def _as_list(function: str, value: Any) -> list[torch.Tensor]:
    """Return the results of a body as a list."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return list(value)
    raise Error(
        f"{function}: the body must return a tensor, or a list or tuple of tensors; it returned a "
        f"{type(value).__name__}."
    )
