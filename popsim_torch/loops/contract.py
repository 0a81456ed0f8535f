"""Checks the arguments and results of a loop's functions during the trace."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from popsim_torch.dtypes import dtype_name, held_dtype, returned_dtype
from popsim_torch.errors import Error, UsageTypeError
from popsim_torch.feeds.infeed import InfeedQueue, taking
from popsim_torch.trace.graph.origin import user_line

__all__ = ["asked", "check_takes", "new_values"]


def check_takes(
    function: Callable[..., Any], given: str, args: Sequence[object], kwargs: Mapping[str, object]
) -> None:
    """Check that a user's function accepts the arguments of a call.

    Args:
        function: The function.
        given: What the function gets, as the beginning of a sentence.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        UsageTypeError: The function accepts other arguments.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function without a signature
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise UsageTypeError(f"{given} and it takes {signature}: {error}.") from None


def new_values(caller: str, result: Any, carried: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the new carried values, without operations (None) that may follow them.

    Args:
        caller: The name of the loop function, for messages.
        result: The result of the body.
        carried: The values of this iteration.

    Raises:
        UsageTypeError: Number, shapes or dtypes differ from the carried values, or an operation
            comes first.
    """
    values = list(result) if isinstance(result, (list, tuple)) else [result]
    while values and values[-1] is None:
        values.pop()
    if any(value is None for value in values):
        raise UsageTypeError(
            f"{caller}: the body returns an operation (None) before a tensor. Return "
            "the carried values first."
        )
    values = [
        torch.tensor(x, device="ipu") if isinstance(x, (bool, int, float)) else x for x in values
    ]
    given, needed = _described(values), _described(carried)
    if given != needed:
        raise UsageTypeError(
            f"{caller}: the body returns [{', '.join(given)}] and carries "
            f"[{', '.join(needed)}]. It must return as many values as it carries, with the same "
            f"shapes and dtypes.{'' if carried else _HOW_TO_SEE_VALUES}"
        )
    return values


_HOW_TO_SEE_VALUES = (
    " To see values of every iteration, pass them to OutfeedQueue.enqueue and return nothing; to "
    "see the last ones, carry them: pass first values in `inputs`."
)


def asked(condition: Callable[..., Any], carried: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what the condition of a ``while_loop`` returns for the carried values.

    Raises:
        UsageTypeError: It accepts other arguments, or does not return one boolean.
    """
    check_takes(
        condition,
        f"while_loop: the condition gets {len(carried)} carried value(s), and no element of the "
        "infeed queue,",
        carried,
        {},
    )
    token = taking.set(_refuse_to_take)
    try:
        value = condition(*carried)
    finally:
        taking.reset(token)
    if isinstance(value, bool):
        value = torch.tensor(value, device="ipu")
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        what = _described([value])[0]
        raise UsageTypeError(f"while_loop: the condition must return one boolean, got {what}.")
    return value.reshape(()).to(device="ipu", dtype=torch.bool)


def _refuse_to_take(_infeed: InfeedQueue) -> Any:
    raise Error(
        f"next(queue){user_line(' at ')}: the condition of a loop takes no element. Take it in the "
        "body, and carry the values that the condition needs."
    )


def _described(values: Sequence[Any]) -> list[str]:
    return [
        f"{dtype_name(returned_dtype(held_dtype(x.dtype)))}{list(x.shape)}"
        if isinstance(x, torch.Tensor)
        else type(x).__name__
        for x in values
    ]
