"""``pipeline``: a training loop or an inference loop whose body is a list of stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from popsim_torch.enums import PipelineSchedule
from popsim_torch.errors import Error, UsageTypeError, UsageValueError
from popsim_torch.executor.reach import reach
from popsim_torch.feeds import InfeedQueue, OutfeedMode, OutfeedQueue
from popsim_torch.loops.function import Recording, recording
from popsim_torch.loops.repeat import repeat
from popsim_torch.ops import op_listener
from popsim_torch.options.model_settings import Owned
from popsim_torch.options.pipelining import (
    GradientAccumulationReductionMethod,
    PipeliningOptions,
    pipeline_settings,
)
from popsim_torch.pipelining.stage_functions import StageFunctions, as_arguments, call

__all__ = ["pipeline"]


def pipeline(
    computational_stages: Sequence[Any],
    gradient_accumulation_count: int | None = None,
    repeat_count: int = 1,
    inputs: Any = (),
    infeed_queue: InfeedQueue | None = None,
    outfeed_queue: OutfeedQueue | None = None,
    optimizer_function: Callable[..., Any] | None = None,
    device_mapping: Sequence[Any] | None = None,
    pipeline_schedule: PipelineSchedule | None = None,
    *,
    outfeed_loss: bool = False,
    outfeed_mask: Sequence[bool] | None = None,
    accumulate_outfeed: bool = False,
    accumulate_outfeed_dtype: torch.dtype | None = None,
    reduction_method: GradientAccumulationReductionMethod = GradientAccumulationReductionMethod.SUM,
    progress: bool = False,
    **options: Any,
) -> None:
    """Run stages as a pipeline, ``repeat_count`` times for ``gradient_accumulation_count``.

    This is a loop on the device; call it in a ``poptorch.function``. The results of a stage are the
    arguments of the next one: a tensor, a tuple, or a dict of keyword arguments. The first stage
    gets ``inputs``, then an element of the infeed. To use a value that changes from call to call
    and is not a weight, such as a temperature, make it an argument of the ``poptorch.function``,
    pass it in ``inputs``, and return it from each stage until it is used.

    An element of ``computational_stages`` may be a list of functions, which are concurrent stages:
    they work on the same micro-batch at the same time, each on its own IPU. All get the same
    arguments, and their results, joined in order, are the arguments of the next stage. The pipeline
    is as long as ``computational_stages``.

    Args:
        computational_stages: The functions, or lists of functions; two or more.
        gradient_accumulation_count: The number of micro-batches per weight update, or in inference
            per run of the pipeline; a multiple of the micro-batches in flight. None for 1, only
            with ``Sequential``.
        repeat_count: The number of runs of the pipeline, which is the number of updates.
        inputs: The first arguments of the first stage: a tensor or number, or a tuple of these.
        infeed_queue: Provides an element for each micro-batch.
        outfeed_queue: Gets the results of the last stage, one element for each micro-batch. It is
            required if anything is returned.
        optimizer_function: Called with the results of the last stage; returns the optimizer, which
            must be made outside of the function, and the loss. None for no training.
        device_mapping: The IPU of each stage, with a list for each list of functions. None puts the
            ``i``-th function on IPU ``i``.
        pipeline_schedule: A ``PipelineSchedule``; None for ``Grouped``.
        outfeed_loss: Whether to enqueue the loss instead of the results.
        outfeed_mask: A list with True for each value of the last stage that is not enqueued.
        accumulate_outfeed: Whether to enqueue one sum for each weight update instead; needs a queue
            with the mode ``ALL``.
        accumulate_outfeed_dtype: The dtype of that sum, ``torch.float32`` or ``torch.float16``;
            None for the dtype of the values.
        reduction_method: How the gradients of an update are combined.
        progress: Whether to show a progress bar.
        **options: Other arguments of ``set_pipelining_options``. Without a
            ``gradient_accumulation_dtype``, here or in options, accumulators have the dtypes of
            their weights, or float16 if the optimizer was made with that ``accum_type``.

    Raises:
        UsageTypeError: An argument has a wrong type.
        UsageValueError: Arguments are out of range, contradict each other, or contradict the
            options of the ``poptorch.function``.
        Error: A stage cannot run, or the call is outside of a ``poptorch.function``.
    """
    stages = StageFunctions.checked(computational_stages)
    training = optimizer_function is not None
    settings = pipeline_settings(
        "pipeline",
        training=training,
        gradient_accumulation_steps_per_replica=gradient_accumulation_count,
        device_mapping=stages.devices(device_mapping),
        pipeline_schedule=pipeline_schedule,
        gradient_accumulation_reduction_method=reduction_method,
        num_stages=len(stages),
        positions=stages.positions,
        **options,
    )
    outputs = _Outputs(
        outfeed_queue,
        loss=_flag("outfeed_loss", outfeed_loss),
        mask=_checked_mask(outfeed_mask),
        accumulated=_flag("accumulate_outfeed", accumulate_outfeed),
        dtype=accumulate_outfeed_dtype,
    )
    outputs.check(training)
    runs = _checked_repeats(repeat_count)
    owner = recording.get()
    if owner is None:
        raise Error(
            "pipeline: it is called outside of a poptorch.function. Put the call into a function "
            "with the decorator @poptorch.function, and call that function."
        )
    stages.check_captured(lambda tensor: owner.number_of(tensor) is not None)
    first = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)

    def iteration(*element: Any, **named: Any) -> None:
        result = stages.run((*first, *element), named)
        loss = None if optimizer_function is None else _train(optimizer_function, result)
        outputs.enqueue(result, loss)

    count = gradient_accumulation_count or 1
    with _settings_of(owner, settings):
        repeat(
            runs * count,
            iteration,
            infeed=infeed_queue,
            gradient_accumulation=count if training else 1,
            progress=progress,
        )


@contextmanager
def _settings_of(owner: Recording, settings: PipeliningOptions) -> Iterator[None]:
    """Apply the options of a pipeline to the loops that are recorded in this scope."""
    owner.settings = (Owned("the pipelining options of poptorch.pipeline", settings),)
    try:
        yield
    finally:
        owner.settings = ()


def _train(optimizer_function: Callable[..., Any], result: Any) -> torch.Tensor:
    """Compute gradients and update weights with the user's function; return the loss."""
    args, kwargs = as_arguments(result)
    made = call("optimizer_function", "the last stage", optimizer_function, args, kwargs)
    if not (
        isinstance(made, tuple | list)
        and len(made) == 2
        and isinstance(made[0], torch.optim.Optimizer)
        and isinstance(made[1], torch.Tensor)
    ):
        raise UsageTypeError(
            f"pipeline: optimizer_function returned a {type(made).__name__}. Return the optimizer "
            "and the loss, a tuple of two."
        )
    optimizer: torch.optim.Optimizer = made[0]
    loss: torch.Tensor = made[1]
    if not any(known is optimizer for known in reach([optimizer_function]).optimizers):
        raise Error(
            "pipeline: optimizer_function made its optimizer while the pipeline was traced. Make "
            "it outside of the function, and return it there."
        )
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss


@dataclass(frozen=True)
class _Outputs:
    """The results of the last stage to enqueue, and their queue."""

    queue: OutfeedQueue | None
    loss: bool
    mask: tuple[bool, ...] | None
    accumulated: bool
    dtype: torch.dtype | None

    def check(self, training: bool) -> None:
        """Check the settings that do not depend on the outputs."""
        if self.queue is not None and not isinstance(self.queue, OutfeedQueue):
            raise UsageTypeError(
                f"pipeline: outfeed_queue is a {type(self.queue).__name__}. Pass a "
                "poptorch.OutfeedQueue."
            )
        if self.loss and self.mask is not None:
            raise UsageValueError(
                "pipeline: outfeed_loss and outfeed_mask exclude each other. With outfeed_loss "
                "only the loss is enqueued: leave one out."
            )
        for name, given in (
            ("outfeed_loss", self.loss),
            ("outfeed_mask", self.mask is not None),
            ("accumulate_outfeed", self.accumulated),
        ):
            if given and not training:
                raise UsageValueError(
                    f"pipeline: {name} needs an optimizer_function: without one there is no loss "
                    "and no weight update. Leave it out."
                )
            if given and self.queue is None:
                raise UsageValueError(f"pipeline: {name} needs an outfeed_queue. Pass one.")
        self._check_sums()

    def _check_sums(self) -> None:
        if self.dtype is not None and not self.accumulated:
            raise UsageValueError(
                "pipeline: accumulate_outfeed_dtype is the type of sums. Pass "
                "accumulate_outfeed=True as well, or leave it out."
            )
        if self.dtype not in (None, torch.float32, torch.float16):
            raise UsageValueError(
                f"pipeline: accumulate_outfeed_dtype={self.dtype!r}. Pass torch.float32 or "
                "torch.float16."
            )
        if self.accumulated and self.queue is not None and self.queue.mode != OutfeedMode.ALL:
            raise UsageValueError(
                f"pipeline: accumulate_outfeed needs a queue of the mode OutfeedMode.ALL, and this "
                f"one's is {self.queue.mode}. Make the queue with OutfeedMode.ALL."
            )

    def enqueue(self, result: Any, loss: torch.Tensor | None) -> None:
        """Enqueue the requested values, in the trace of an iteration."""
        chosen = loss if self.loss else self._unmasked(result)
        if chosen is None:
            return
        if self.queue is None:
            raise UsageValueError(
                "pipeline: the last stage returns values, and there is no outfeed_queue for them. "
                "Pass one, or return nothing."
            )
        listener: Any = op_listener.get()
        summed = listener.summed_elements(self.dtype) if self.accumulated else nullcontext()
        with summed:
            self.queue.enqueue(chosen)

    def _unmasked(self, result: Any) -> Any:
        """Return the values of the last stage that the mask does not exclude."""
        args, kwargs = as_arguments(result)
        if self.mask is None:
            return result if args or kwargs else None
        if kwargs or len(args) != len(self.mask):
            what = "a dict" if kwargs else f"{len(args)} value(s)"
            raise UsageValueError(
                f"pipeline: outfeed_mask has {len(self.mask)} entries, and the last stage returns "
                f"{what}. Pass True or False for each value of a tuple."
            )
        left = tuple(value for value, hidden in zip(args, self.mask, strict=True) if not hidden)
        return left or None


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise UsageTypeError(f"pipeline: {name}={value!r}. Pass True or False.")
    return value


def _checked_mask(mask: object) -> tuple[bool, ...] | None:
    if mask is None:
        return None
    if not isinstance(mask, list | tuple) or not all(isinstance(one, bool) for one in mask):
        raise UsageTypeError(
            f"pipeline: outfeed_mask={mask!r}. Pass a list with True or False for each value that "
            "the last stage returns."
        )
    return tuple(mask)


def _checked_repeats(count: object) -> int:
    if not isinstance(count, int) or isinstance(count, bool):
        raise UsageTypeError(f"pipeline: repeat_count={count!r}. Pass an int, 1 or more.")
    if count < 1:
        raise UsageValueError(f"pipeline: repeat_count={count}. Pass 1 or more.")
    return count
