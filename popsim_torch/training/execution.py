"""Runs a number of steps on the device, with the queues that they need."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from popsim_torch.errors import UsageTimeoutError, UsageValueError
from popsim_torch.executor.observing import Observing
from popsim_torch.feeds import InfeedQueue, OutfeedQueue
from popsim_torch.loops import Function
from popsim_torch.loops.repeat import LoopCall
from popsim_torch.options import Options
from popsim_torch.private_torch.trees import tree_leaves, tree_map
from popsim_torch.stages import WrongNumberOfMicroBatches
from popsim_torch.training.anchors import FittedAnchors

__all__ = ["Execution"]

_SECONDS_BETWEEN_LOOKS = 0.05

Body = Callable[[Sequence[Any], Mapping[str, Any]], Any]


class Execution:
    """Runs a step a number of times on the device, and returns the results of all steps.

    Args:
        caller: The name of the caller, for messages.
        body: Called with the arguments of a batch; returns the results of the step. Traced once.
        stream: The batches of all runs.
        steps: The number of steps in a run, a multiple of the number of replicas. Each replica
            takes the next batch, so steps of all replicas follow one another.
        accumulation: The number of micro-batches per weight update; None if weights are not
            updated.
        options: The options of the program.
        observing: Gives what it observes; None if nobody asks.
        steps_name: The caller's name for ``steps``, for messages.

    Attributes:
        anchors: The values that the options' anchors recorded in the latest run.
    """

    def __init__(
        self,
        caller: str,
        body: Body,
        stream: Iterator[Any],
        steps: int,
        accumulation: int | None,
        options: Options,
        observing: Observing | None = None,
        steps_name: str = "steps_per_execution",
    ) -> None:
        self._steps_name = steps_name
        self._infeed = infeed = InfeedQueue(stream)
        self._outfeed = outfeed = OutfeedQueue()
        infeed._shown_name, outfeed._shown_name = f"data of {caller}", f"results of {caller}"
        self._caller, self._steps, self._accumulation = caller, steps, accumulation
        self._replicas = options.replication_factor
        iterations = steps // self._replicas
        # The results of the current run so far, in parts; other threads read the newest step.
        self._parts: list[Any] = []
        self._newest: Any = None
        self._reading, self._is_live = threading.Lock(), False

        def step(*args: Any, **kwargs: Any) -> None:
            outfeed.enqueue(body(args, kwargs))

        def run() -> None:
            LoopCall(caller, step, [], infeed).run(iterations, accumulation, None)

        self._function = Function(run, options, observing, is_one_loop=True)
        self.anchors = FittedAnchors(self._function, list(options.anchored_tensors))

    @property
    def batch_size(self) -> int:
        """The number of samples in a batch: the size of the first axis of its first tensor."""
        (_, shape), *_ = self._infeed._element()[1]
        return shape[0] if shape else 1

    @property
    def compile_seconds(self) -> float:
        """The time that compilation has taken so far (seconds)."""
        programs = self._function.programs
        return sum(program.compiled.duration.total_seconds() for program in programs)

    @property
    def num_steps(self) -> int:
        """The number of steps begun so far, over all runs; may be called in any thread."""
        iterations = sum(program.num_iterations for program in self._function.programs)
        return iterations * self._replicas

    def run(self) -> Any:
        """Run once; return the results of the body, with a first axis for the steps."""
        self._parts = []
        self._call()
        with self._reading:
            self._take()
            parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else tree_map(lambda *own: torch.cat(own), *parts)

    def newest(self) -> Any:
        """Return the results of the newest step, None before the first one; for any thread."""
        with self._reading:
            if not self._is_live and self._outfeed.enqueued:
                self._take()
            return self._newest

    def _take(self) -> None:
        """Read the available steps, as a part of the run."""
        part = self._outfeed.dequeue()
        if self._replicas > 1:
            part = tree_map(lambda tensor: tensor.flatten(0, 1), part)
        counts = [len(tensor) for tensor in tree_leaves(part)]
        # A run on synthetic data has no results, and returns an empty part.
        if not self._parts or any(counts):
            self._parts.append(part)
        if any(counts):
            self._newest = tree_map(lambda tensor: tensor[-1], part)

    def run_live(self, each: Callable[[Any], None]) -> list[Any]:
        """Run once, and pass on the results of each step as soon as they arrive, in another thread.

        Args:
            each: Called with one element after the other. An exception ends the run.

        Returns:
            All elements.

        Raises:
            BaseException: The exception of ``each``, or of the run.
        """
        elements: list[Any] = []
        failures: list[BaseException] = []
        over, abandoned = threading.Event(), threading.Event()

        def read() -> None:
            while len(elements) < self._steps and not abandoned.is_set():
                was_over = over.is_set()
                try:
                    element = self._outfeed.get(timeout=_SECONDS_BETWEEN_LOOKS)
                except UsageTimeoutError:
                    if was_over:
                        return
                    continue
                for own in self._by_replica(element):
                    elements.append(own)
                    self._newest = own
                    each(own)

        def read_and_tell() -> None:
            try:
                read()
            except BaseException as error:
                failures.append(error)
                self._function.stop()

        with self._reading:
            self._is_live = True
        reader = threading.Thread(target=read_and_tell, name="popsim_torch callbacks", daemon=True)
        reader.start()
        try:
            self._call()
        except BaseException as error:
            abandoned.set()
            reader.join()
            # If a callback failed, it has ended the run.
            if failures and isinstance(error, Exception) and failures[0] is not error:
                raise failures[0] from None
            raise
        finally:
            over.set()
            reader.join()
            self._is_live = False
        if failures:
            raise failures[0]
        return elements

    def _by_replica(self, element: Any) -> list[Any]:
        """Return the results of each replica in an element of the queue."""
        if self._replicas == 1:
            return [element]
        return [tree_map(lambda tensor, r=r: tensor[r], element) for r in range(self._replicas)]

    def _call(self) -> None:
        try:
            self._function()
        except WrongNumberOfMicroBatches as error:
            raise UsageValueError(
                f"{self._caller}: {self._steps_name} = {self._steps} does not fit the pipeline, "
                f"which needs {error.rule} micro-batches in each run. Pass "
                f"{self._steps_name}={error.near}, or a suitable number of batches."
                if self._accumulation is None
                else f"{self._caller}: the {self._accumulation} micro-batches of a weight update "
                f"do not fit the pipeline, which needs {error.rule}. Call "
                f"options.Training.gradientAccumulation({error.near}), or pass "
                f"gradient_accumulation_steps_per_replica={error.near} to set_pipelining_options, "
                "and make steps_per_execution a multiple of it."
            ) from error

    def end(self) -> None:
        """Copy the weights to the host, and release the program and the queues."""
        try:
            self.anchors.keep()
            self._function.destroy()
        finally:
            self._outfeed.close()
            self._infeed.close()
