"""Anchors: requests to return an internal tensor of the graph, and which values are returned.

The output modes return the same micro-batches of a model's outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from popsim_torch import logs
from popsim_torch.enums import OutputMode
from popsim_torch.errors import (
    Error,
    InternalError,
    UsageAssertionError,
    closest_names,
    listed_names,
)
from popsim_torch.tensors.selections import Selection, as_selection, is_plain_name, words_of

__all__ = [
    "AnchorRequest",
    "anchor_of_group",
    "anchor_requests",
    "check_return_mode",
    "kept_micro_batches",
    "num_returned",
    "shape_of_entries",
    "unknown_anchor",
]


@dataclass(frozen=True)
class AnchorRequest:
    """One call of ``Options.anchorTensor``, with its output mode.

    Attributes:
        short_name: The name that the user's program passes to ``getAnchoredTensor``.
        long_name: The name of the tensor in the graph, or a selection of tensors.
        output_mode: Which micro-batches are returned; not ``Default``.
        period: The return period of ``EveryN`` (device iterations); 1 in the other modes.
    """

    short_name: str
    long_name: str | Selection
    output_mode: OutputMode
    period: int

    @property
    def pattern(self) -> Selection | None:
        """What may mean several tensors; None for a name of one tensor."""
        if is_plain_name(self.long_name):
            return None
        return as_selection(self.call, self.long_name)

    @property
    def call(self) -> str:
        """The user's call, for messages."""
        given = self.long_name
        shown = repr(given) if isinstance(given, str) else words_of(given)
        return f"Options.anchorTensor({self.short_name!r}, {shown})"

    @classmethod
    def of(
        cls, short_name: str, entry: Any, model_mode: OutputMode, model_period: int
    ) -> AnchorRequest:
        """Return the request of an entry of ``Options.anchored_tensors``.

        Args:
            short_name: The key of the entry.
            entry: A list: the long name, whether to use the model's mode and period, the mode, the
                period.
            model_mode: The output mode of the model, not ``Default``.
            model_period: The output return period of the model (device iterations).

        Raises:
            Error: The entry is not such a list.
            InternalError: ``model_mode`` is ``Default``: the mode of the model must be chosen
                before.
        """
        try:
            long_name, uses_default, mode, period = entry
            mode = OutputMode(mode)
        except (TypeError, ValueError):
            raise Error(
                f"Options.anchored_tensors[{short_name!r}] is {entry!r}. Need a list of the long "
                "name, whether to use the model's mode, the mode and the period: call "
                "Options.anchorTensor."
            ) from None
        if not uses_default:
            return cls(short_name, long_name, mode, period)
        if model_mode == OutputMode.Default:
            raise InternalError(
                f"AnchorRequest: anchor '{short_name}' uses the output mode of the model, which is "
                "not chosen yet"
            )
        period = model_period if model_mode == OutputMode.EveryN else 1
        return cls(short_name, long_name, model_mode, period)


def anchor_of_group(short_name: str, name: str) -> str:
    """Return the short name of one of the tensors that the pattern of an anchor means.

    Args:
        short_name: The short name of the anchor.
        name: The name of the tensor.
    """
    return f"{short_name}/{name}"


def unknown_anchor(
    short_name: str, anchors: Iterable[str], where: str, *, method: str = "getAnchoredTensor"
) -> UsageAssertionError:
    """Return the error for a short name that no anchor has.

    Args:
        short_name: The unknown name.
        anchors: The short names of the registered anchors.
        where: Where to register an anchor, as the end of a sentence.
        method: The method that was called.
    """
    known = list(anchors)
    close = closest_names(short_name, known)
    hint = f" Closest name: '{close[0]}'." if close else ""
    listed = f" There {'is' if len(known) == 1 else 'are'} {listed_names(known)}." if known else ""
    return UsageAssertionError(
        f"{method}: No tensor with name '{short_name}' among the {len(known)} anchors."
        f"{hint}{listed} Register it with Options.anchorTensor {where}."
    )


_MODES = {
    OutputMode.All: "ALL",
    OutputMode.Final: "FINAL",
    OutputMode.EveryN: "EVERYN",
    OutputMode.Sum: "Sum",
}


def anchor_requests(
    entries: Mapping[str, Any], model_mode: OutputMode, model_period: int
) -> tuple[AnchorRequest, ...]:
    """Return the requests of ``Options.anchored_tensors``, and write them to the back end's log.

    Args:
        entries: The entries, by short name.
        model_mode: As in :meth:`AnchorRequest.of`.
        model_period: As in :meth:`AnchorRequest.of`.

    Raises:
        Error: An entry is malformed.
    """
    requests = tuple(
        AnchorRequest.of(short_name, entry, model_mode, model_period)
        for short_name, entry in entries.items()
    )
    for anchor in requests:
        shown = _MODES[anchor.output_mode]
        given = anchor.long_name
        name = given if isinstance(given, str) else words_of(given)
        logs.backend.debug("anchor ( %s %s/%d )", name, shown, anchor.period)
    return requests


def check_return_mode(
    mode: OutputMode,
    period: int,
    device_iterations: int,
    *,
    pipelined: bool = False,
    any_period: bool = False,
    where: str = "Options.outputMode",
) -> None:
    """Check that an output mode fits the model; only ``EveryN`` may be refused.

    Args:
        mode: The mode asked for.
        period: The return period (device iterations); ignored in other modes than ``EveryN``.
        device_iterations: How often the device repeats the step per call (count).
        pipelined: Whether the model runs as a pipeline of more than one stage.
        any_period: Whether to accept periods that do not divide ``device_iterations``.
        where: The setter to name in the message.

    Raises:
        Error: ``mode`` is ``EveryN`` and the model is pipelined, or the period is not a divisor of
            ``device_iterations`` from 1 to ``device_iterations``.
    """
    if mode != OutputMode.EveryN:
        return
    if pipelined:
        raise Error(
            f"{where}: EVERYN is not valid for pipelined models. "
            "Use OutputMode.All and pick the entries you need, or run with ShardedExecution."
        )
    divides = 1 <= period <= device_iterations and device_iterations % period == 0
    if not divides and not any_period:
        raise Error(
            f"{where}: the return period {period} of OutputMode.EveryN does not divide the "
            f"{device_iterations} device iteration(s) of one call. "
            f"Choose a period from 1 to {device_iterations} that divides {device_iterations}, "
            "or change Options.deviceIterations."
        )


def kept_micro_batches(
    mode: OutputMode,
    period: int,
    device_iterations: int,
    gradient_accumulation: int,
    iterations_before: int = 0,
) -> tuple[range, range]:
    """Return the micro-batches of a call whose values are returned.

    The device has the same rule in ``csrc/ops/host/anchor.cpp``; ``tests/ops/test_anchor.py`` tests
    that both agree.

    Args:
        mode: Which micro-batches are returned, not ``Default``. ``Sum`` is returned with the last
            one.
        period: The return period of ``EveryN`` (device iterations). A period longer than a call is
            counted across calls: some calls then return one iteration, and the others none.
        device_iterations: How often the device repeats the step per call (count).
        gradient_accumulation: Micro-batches per weight update (count); 1 for inference.
        iterations_before: Device iterations of earlier calls (count).

    Returns:
        The device iterations, and the accumulation steps of each of them, counted from 0.

    Raises:
        InternalError: ``mode`` is ``Default``.
    """
    if mode in (OutputMode.Final, OutputMode.Sum):
        last = device_iterations - 1, gradient_accumulation - 1
        return range(last[0], last[0] + 1), range(last[1], last[1] + 1)
    if mode not in (OutputMode.All, OutputMode.EveryN):
        raise InternalError(
            f"anchors.kept_micro_batches: {mode!r} does not say which micro-batches to return"
        )
    every = period if mode == OutputMode.EveryN else 1
    before = iterations_before % every if every > device_iterations else 0
    first = every - 1 - before
    return range(first, device_iterations, every), range(gradient_accumulation)


def num_returned(
    mode: OutputMode,
    period: int,
    device_iterations: int,
    gradient_accumulation: int,
    replicas: int,
    *,
    any_period: bool = False,
    where: str = "Options.outputMode",
) -> int:
    """Return how many micro-batch values of a tensor one call returns.

    If the period is longer than a call, a call without a due iteration returns an earlier value.

    Args:
        mode: Which micro-batches are returned, not ``Default``.
        period: The return period of ``EveryN`` (device iterations).
        device_iterations: How often the device repeats the step per call (count).
        gradient_accumulation: Micro-batches per weight update (count); 1 for inference.
        replicas: Copies of the model (count).
        any_period: As in :func:`check_return_mode`.
        where: The setter at fault, for the message of an error.

    Raises:
        Error: The period of ``EveryN`` does not fit, see :func:`check_return_mode`.
        InternalError: ``mode`` is ``Default``.
    """
    check_return_mode(mode, period, device_iterations, any_period=any_period, where=where)
    iterations, steps = kept_micro_batches(mode, period, device_iterations, gradient_accumulation)
    return max(len(iterations), 1) * len(steps) * replicas


def shape_of_entries(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return the shape of the tensor that returns several values of a tensor.

    Args:
        shape: The shape of one value; ``[d0, ...]`` gives ``[d0 * count, ...]``.
        count: The number of values: one scalar is returned as a scalar, several as ``[count]``.
    """
    if not shape:
        return () if count == 1 else (count,)
    return (shape[0] * count, *shape[1:])
