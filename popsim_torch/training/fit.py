"""``fit``, ``evaluate`` and ``predict``: run whole epochs on the device."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from popsim_torch.errors import Error, UsageTypeError, UsageValueError
from popsim_torch.executor.executor import PoplarExecutor
from popsim_torch.executor.observing import Observing
from popsim_torch.executor.tracebacks import shows_short_tracebacks
from popsim_torch.loops.progress import progress_bar
from popsim_torch.options import Options
from popsim_torch.options.model_settings import add_settings
from popsim_torch.private_torch.trees import tree_map
from popsim_torch.training.batches import Batches
from popsim_torch.training.callbacks import Callbacks
from popsim_torch.training.execution import Execution
from popsim_torch.training.given import BAR, checked_verbose, reader_of, unwrapped
from popsim_torch.training.history import EpochRecord, History, with_history
from popsim_torch.training.model_call import Metrics, ModelCall, inputs_of, mode, named_metrics
from popsim_torch.training.steps import FROM_OPTIONS, Steps, plan_steps
from popsim_torch.training.validation import on_one_replica, plan_validation

__all__ = ["evaluate", "fit", "predict"]

Loss = Callable[[Any, Any], torch.Tensor]
Values = dict[str, torch.Tensor]

_FROM_MODEL = "the pipelining options of the model"


@shows_short_tracebacks
def fit(
    model: nn.Module | PoplarExecutor,
    data: Any,
    epochs: int = 1,
    steps_per_epoch: int | None = None,
    steps_per_execution: int | None = None,
    callbacks: Any = (),
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    options: Options | None = None,
    metrics: Metrics | None = None,
    verbose: str | int = "auto",
    validation_data: Any = None,
    validation_steps: int | None = None,
) -> History:
    """Train a model for some epochs, many steps in each run of the device.

    The program is compiled once and takes its data from a queue that a thread fills in advance. If
    the data ends before the last epoch, it starts again.

    Args:
        model: A module, or the result of ``trainingModel``, which has an optimizer and options.
        data: Batches of one size: a loader or any iterable. With ``loss`` a batch has the inputs of
            the model and, last, the target; otherwise the arguments of forward.
        epochs: The number of epochs.
        steps_per_epoch: The number of micro-batches in an epoch; None for one pass through the
            data.
        steps_per_execution: The number of micro-batches in one run of the device, a multiple of the
            options' gradient accumulation, and a divisor of ``steps_per_epoch``; None for the whole
            epoch, or for the options' device iterations if there are several.
        callbacks: Objects with any of ``on_epoch_begin(epoch)``, ``on_epoch_end(epoch, logs)``,
            whose ``logs`` has a tensor of shape ``(steps_per_epoch,)`` for the loss and each
            metric, and ``on_batch_end(step, logs)``, which is called with scalars while the
            device runs, in another thread. ``on_epoch_end`` may take a third argument: the values
            that the options' anchors recorded in the latest run, by short name.
            ``on_fit_begin(model, optimizer)`` is called first. A callback that raises
            ``StopIteration`` ends the training. ``EarlyStopping``, ``Checkpoint`` and
            ``LearningRateScheduler`` are ready to use. A sink of records, such as
            ``poptorch.LiveTerminal()`` or ``poptorch.HtmlPage(path)``, gets what
            ``options.observe`` asks for, and is closed at the end.
        loss: A function of the output and the target; None if forward returns the loss: a
            scalar, alone or in a tuple, or under the key ``"loss"``.
        optimizer: From ``torch.optim`` or ``poptorch.optim``, or an ``OutfeedOptimizer``.
        options: The options of the program; their gradient accumulation takes effect.
        metrics: Functions of the output and the target, or ``"accuracy"``; a sequence, or a mapping
            of names to functions. They are computed on the device.
        verbose: 0 prints nothing, 1 a progress bar with the newest step's loss and a line for each
            epoch, 2 only the line; ``"auto"`` is 1 on a terminal and 2 elsewhere.
        validation_data: Batches like those of ``data``. After each epoch the model is evaluated on
            them, in evaluation mode: ``val_loss`` and ``val_<metric>`` are in the history, and as
            scalars in the ``logs`` of ``on_epoch_end``.
        validation_steps: The number of batches for each evaluation; None for one pass through them.

    Returns:
        The numbers of each epoch; ``history.anchors`` has the recorded values of anchors, as
        ``model.getAnchoredTensor`` of an executor does, and ``history.observations()`` returns the
        records of ``options.observe``, as ``model.observations()`` of an executor does.

    Raises:
        UsageTypeError: An argument has a wrong type.
        UsageValueError: The counts contradict each other.
        Error: The model cannot be compiled, a step fails, or the data ends.
        BadNumberError: A number is NaN or infinite, and the options watch for that. The weights are
            those before the bad device iteration.
        RecordError: A record met a condition of ``options.observe``.
        KeyboardInterrupt: Ctrl-C ended the training. This and each other exception that ends it has
            an attribute ``history``, with what the result has: the numbers of the epochs that are
            over, the values of anchors, and the records.
    """
    shown = checked_verbose("fit", verbose)
    module, options, optimizer = unwrapped("fit", model, options, optimizer)
    if optimizer is None:
        raise UsageTypeError(
            "fit: there is no optimizer. Pass optimizer=torch.optim.SGD(model.parameters(), "
            "lr=0.01), or another one of torch.optim or poptorch.optim."
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageTypeError(f"fit: the optimizer is a {type(optimizer).__name__}.")
    batches = Batches("fit", data)
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise UsageValueError(f"fit: epochs must be an integer of 1 or more, got {epochs!r}.")
    told = Callbacks("fit", callbacks)
    call = ModelCall("fit", module, loss, named_metrics("fit", metrics))
    told.check_monitored(["loss", *call.metrics], validated=validation_data is not None)
    validation = plan_validation(call, validation_data, validation_steps, epochs, options)
    options, given = options.clone(), options.Training.gradient_accumulation
    add_settings(options, module, training=True)
    accumulation = options.Training.gradient_accumulation
    replicas = options.replication_factor
    if options.input_group_size > 1:
        raise Error(
            f"fit: Options.inputReplicaGrouping({options.input_group_size}) gives replicas the "
            "same input, and fit gives each replica batches of its own. Leave it out."
        )
    steps = plan_steps(
        "fit",
        batches.count,
        steps_per_epoch,
        steps_per_execution,
        accumulation=accumulation * replicas,
        accumulation_from=(FROM_OPTIONS if accumulation == given else _FROM_MODEL)
        + (f", in each of {replicas} replicas" if replicas > 1 else ""),
        device_iterations=options.device_iterations,
    )
    stepped = optimizer

    def body(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Values:
        values = call(args, kwargs)
        stepped.zero_grad()
        values["loss"].backward()  # type: ignore[no-untyped-call]
        stepped.step()
        return values

    observing = _observing(model, options)
    history = History(_observing=observing)
    with (
        with_history(history),
        mode(module, training=True),
        observing.passing_on("fit", told.sinks),
        _execution(
            "fit", model, batches, body, steps, epochs, accumulation, options, observing
        ) as execution,
        contextlib.closing(validation),
        contextlib.suppress(_Ended),
    ):
        history.anchors = execution.anchors
        with _may_end():
            told.fit_begin(module, optimizer)
        for epoch in range(epochs):
            title = f"Epoch {epoch + 1}/{epochs}"
            with _may_end():
                told.epoch_begin(epoch)
            logs, record = _run_epoch(execution, steps, epoch, title, told, shown)
            found = validation.run()
            logs.update({name: torch.tensor(mean) for name, mean in found.items()})
            record = dataclasses.replace(record, means={**record.means, **found})
            history.epochs.append(record)
            if shown:
                print(record.line(title), flush=True)
            with _may_end():
                told.epoch_end(epoch, logs, execution.anchors)
    return history


@shows_short_tracebacks
def evaluate(
    model: nn.Module | PoplarExecutor,
    data: Any,
    steps: int | None = None,
    steps_per_execution: int | None = None,
    callbacks: Any = (),
    loss: Loss | None = None,
    options: Options | None = None,
    metrics: Metrics | None = None,
    verbose: str | int = "auto",
) -> dict[str, float]:
    """Return the mean loss and metrics of a model over some data, in evaluation mode.

    Args:
        model: As for :func:`fit`.
        data: As for :func:`fit`.
        steps: The number of batches; None for one pass through the data.
        steps_per_execution: The number of batches in one run of the device; None for all.
        callbacks: Objects whose ``on_batch_end(step, logs)`` is called after each step, and sinks
            of records.
        loss: As for :func:`fit`.
        options: The options of the program; gradient accumulation is not used. Its ``observe``
            needs a sink, or an executor of ``inferenceModel``; ``every`` counts runs of the device.
        metrics: As for :func:`fit`.
        verbose: As for :func:`fit`.

    Returns:
        The means by name.

    Raises:
        Error: As for :func:`fit`.
    """
    shown = checked_verbose("evaluate", verbose)
    told = Callbacks("evaluate", callbacks)
    module, options, _ = unwrapped("evaluate", model, options, None, sinks=told.sinks)
    call = ModelCall("evaluate", module, loss, named_metrics("evaluate", metrics))
    batches = Batches("evaluate", data)
    options = on_one_replica(options)
    counts = _inference_steps("evaluate", batches, steps, steps_per_execution, options)

    def body(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Values:
        with torch.no_grad():
            return call(args, kwargs)

    observing = _observing(model, options)
    with (
        mode(module, training=False),
        observing.passing_on("evaluate", told.sinks),
        _execution(
            "evaluate", model, batches, body, counts, 1, None, options, observing
        ) as execution,
    ):
        try:
            _, record = _run_epoch(execution, counts, 0, "Evaluation", told, shown)
        except _Ended:
            raise Error(
                "evaluate: a callback raised StopIteration, but a part of an evaluation has no "
                "meaning. Pass steps to use less data."
            ) from None
    if shown:
        print(record.line("Evaluation"), flush=True)
    return dict(record.means)


@shows_short_tracebacks
def predict(
    model: nn.Module | PoplarExecutor,
    data: Any,
    steps: int | None = None,
    steps_per_execution: int | None = None,
    options: Options | None = None,
    verbose: str | int = 0,
) -> Any:
    """Return the outputs of a model for some data, in evaluation mode.

    Args:
        model: As for :func:`fit`.
        data: Batches with the arguments of forward. A last part that forward cannot take, such as
            the target of a batch for training, is left out.
        steps: The number of batches; None for one pass through the data.
        steps_per_execution: The number of batches in one run of the device; None for all.
        options: The options of the program. Its ``observe`` needs an executor of
            ``inferenceModel``; ``every`` counts runs of the device.
        verbose: 1 or ``"auto"`` on a terminal shows a progress bar.

    Returns:
        The results of forward, with the batches joined along the first axis; scalars become
        vectors.

    Raises:
        Error: As for :func:`fit`.
    """
    shown = checked_verbose("predict", verbose)
    module, options, _ = unwrapped("predict", model, options, None)
    batches = Batches("predict", data)
    options = on_one_replica(options)
    counts = _inference_steps("predict", batches, steps, steps_per_execution, options)

    body = _prediction(module)
    parts = []
    with (
        mode(module, training=False),
        _execution(
            "predict", model, batches, body, counts, 1, None, options, _observing(model, options)
        ) as execution,
        _bar(execution, counts, "Prediction", shown),
    ):
        for _ in range(counts.executions):
            parts.append(tree_map(_without_steps, execution.run()))
    if len(parts) == 1:
        return parts[0]
    return tree_map(lambda *tensors: torch.cat(tensors), *parts)


def _prediction(model: nn.Module) -> Callable[[Sequence[Any], Mapping[str, Any]], Any]:
    """Return a function that calls a model with a batch; its name is used for tensor names."""

    def body(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        args, kwargs = inputs_of(model, args, kwargs)
        with torch.no_grad():
            return model(*args, **kwargs)

    return body


def _without_steps(tensor: torch.Tensor) -> torch.Tensor:
    """Join the axis of the steps with the axis of the batch."""
    return tensor if tensor.dim() == 1 else tensor.flatten(0, 1)


class _Ended(Exception):
    """Raised when a callback has ended the training."""


@contextlib.contextmanager
def _may_end() -> Iterator[None]:
    """Turn a ``StopIteration`` of a callback into ``_Ended``."""
    # A separate exception is needed: a StopIteration that leaves a context manager means something
    # else.
    try:
        yield
    except StopIteration as error:
        raise _Ended from error


def _run_epoch(
    execution: Execution, steps: Steps, epoch: int, title: str, told: Callbacks, shown: int
) -> tuple[Values, EpochRecord]:
    """Run the steps of an epoch; return their values and the epoch's numbers."""
    before, start = execution.compile_seconds, time.perf_counter()
    parts: list[Values] = []
    with _bar(execution, steps, title, shown, lambda: _newest_loss(execution)):
        for number in range(steps.executions):
            if told.wants_batches:
                first = number * steps.per_execution
                parts.append(_run_live(execution, first, told))
            else:
                parts.append(execution.run())
    seconds = time.perf_counter() - start
    logs = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    record = EpochRecord(
        epoch,
        {name: values.double().mean().item() for name, values in logs.items()},
        seconds,
        execution.compile_seconds - before,
        steps.per_epoch * execution.batch_size,
    )
    return logs, record


def _run_live(execution: Execution, first: int, told: Callbacks) -> Values:
    """Run once, and call the callbacks for each step during the run."""
    step = first

    def tell(values: Values) -> None:
        nonlocal step
        told.batch_end(step, values)
        step += 1

    with _may_end():
        elements = execution.run_live(tell)
    return {name: torch.stack([one[name] for one in elements]) for name in elements[0]}


def _observing(model: nn.Module | PoplarExecutor, options: Options) -> Observing:
    """Return the object that gives what a program observes; an executor has one."""
    reader = reader_of(model)
    return Observing(options) if reader is None or not options._observations else reader


@contextlib.contextmanager
def _execution(
    function: str,
    model: nn.Module | PoplarExecutor,
    batches: Batches,
    body: Callable[[Sequence[Any], Mapping[str, Any]], Any],
    steps: Steps,
    epochs: int,
    accumulation: int | None,
    options: Options,
    observing: Observing,
) -> Iterator[Execution]:
    """Make the program of some epochs, and end it at the end of the scope."""
    total = epochs * steps.per_epoch
    batches.check_sizes(total)
    stream = batches.stream(total)
    execution = Execution(
        function, body, stream, steps.per_execution, accumulation, options, observing
    )
    if isinstance(model, PoplarExecutor) and options.anchored_tensors:
        model._device.fitted_anchors = execution.anchors
    try:
        yield execution
    finally:
        execution.end()


def _inference_steps(
    function: str,
    batches: Batches,
    steps: int | None,
    per_execution: int | None,
    options: Options,
) -> Steps:
    return plan_steps(
        function,
        batches.count,
        steps,
        per_execution,
        device_iterations=options.device_iterations,
        epoch_name="steps",
    )


def _bar(
    execution: Execution,
    steps: Steps,
    title: str,
    shown: int,
    figures: Callable[[], Mapping[str, str]] | None = None,
) -> contextlib.AbstractContextManager[None]:
    iterations = steps.per_epoch if shown == BAR else 0
    return progress_bar(
        lambda: execution.num_steps, iterations, title, unit="step", leave=False, figures=figures
    )


def _newest_loss(execution: Execution) -> dict[str, str]:
    """Return the loss of the newest step, for a progress bar; nothing before the first step."""
    values = execution.newest()
    return {} if values is None else {"loss": f"{values['loss'].item():.4g}"}
