"""The settings of ``Options`` that choose what is observed inside of a program while it runs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from popsim_torch.errors import (
    UsageAssertionError,
    UsageAttributeError,
    UsageTypeError,
    UsageValueError,
)
from popsim_torch.options.base import Setting
from popsim_torch.options.outputs import OutputOptions
from popsim_torch.statistics import Counts, Moments, Request, check_requests
from popsim_torch.tensors.selections import Select, as_selection

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Observation", "ObservingOptions"]

_OVER = ("micro_batch", "iteration")


@dataclass(frozen=True)
class Observation:
    """One call of ``Options.observe``.

    Attributes:
        select: The tensors.
        requests: The statistics.
        every: The distance of observed device iterations; None if the budget decides.
        budget: The share of the run's time that observing may take.
        by_iteration: Whether the statistics are over all micro-batches of a device iteration.
        when: Called with each record; whether to act. None never acts.
        then: Called with such a record; None to end the run.
        said: The parts of selections that had a warning because no tensor matches. None if a name
            that no tensor has is an error.
    """

    select: Select
    requests: tuple[Request, ...]
    every: int | None
    budget: float
    by_iteration: bool
    when: Callable[[Any], object] | None = None
    then: Callable[[Any], object] | None = None
    said: set[str] | None = field(default=None, repr=False, compare=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Observation:
        # The functions stay the user's objects.
        return self


class ObservingOptions(OutputOptions):
    """The part of ``Options`` about statistics that are computed inside of a program."""

    _observations = Setting[list[Observation]]([], setter="observe", is_key=False)

    def _observe_found(self, said: set[str]) -> Self:
        """Return a copy for several loops, each of which observes the names that it has.

        Args:
            said: See ``Observation``.
        """
        own = copy.copy(self)
        own._observations[:] = [replace(one, said=said) for one in own._observations]
        return own

    def observe(
        self,
        select: Select,
        *what: Request,
        every: int | None = None,
        budget: float = 0.02,
        over: str = "micro_batch",
        when: Callable[[Any], object] | None = None,
        then: Literal["stop"] | Callable[[Any], object] = "stop",
    ) -> Self:
        """Compute statistics of tensors while the model runs, without copying the tensors.

        Most device iterations run the same program as without this call. Every k-th one runs a
        second version of it, with the same values, which computes the statistics, too.
        ``model.observations()`` returns them, and ``model.add_sink(sink)`` passes them on while
        the model runs. Values and weights are the same bits with and without it.
        The setting is not a part of files: an executor that loads one observes what its own options
        say.

        Args:
            select: The tensors: a name, a pattern such as ``"Gradient___*"``, a regular expression,
                a function, or any other selection of ``poptorch.tensors``.
            *what: The statistics: any of ``Moments()``, ``Counts()``, ``Histogram()``, ``TopK()``,
                ``Sample()``, ``Fingerprint()`` and ``Channels()``; without it, the first two. The
                numbers of values, of NaN and of infinities always come.
            every: Observe the device iterations 0, ``every``, ``2 * every``, ... (1 or more). In
                inference it counts calls; in ``evaluate``, ``predict`` and loops that step no
                optimizer it counts runs of the device, each with all its iterations: the batches of
                ``steps_per_execution``. None for as many as the budget allows, which follows from
                the times of the iterations; ``model.observing()`` shows it.
            budget: The share of the run's time that observing may take (above 0) if ``every`` is
                None; several calls of ``observe`` have the smallest of theirs together.
            over: ``"micro_batch"`` for statistics of each micro-batch; ``"iteration"`` for those of
                all micro-batches of a device iteration together, which have no samples, largest
                values or fingerprints if there is more than one.
            when: A function that is called with each ``Record`` and returns whether something is
                wrong: ``lambda record: record.statistics.norm > 100``. A thread of its own calls it
                while the model runs; the end of a call waits until it has seen all records of it,
                so it must not wait for the thread that calls the model.
            then: What happens the first time that something is wrong: ``"stop"`` ends the call with
                a ``RecordError``; a few device iterations may have run in between. Or a function
                that is called with each such record; it needs ``when``.

        Returns:
            The options.

        Raises:
            UsageTypeError: ``select``, a statistic, ``when`` or ``then`` is something else, or
                there is a function ``then`` and no ``when``.
            UsageValueError: ``every``, ``budget`` or ``over`` has a wrong value, or two statistics
                of one kind differ.
            UsageAttributeError: A model was wrapped with these options, or a function with them was
                recorded.
            UsageAssertionError: Another call of ``observe`` has another ``every``.
        """
        call = "Options.observe"
        as_selection(call, select)  # raises if it is none
        requests = what or (Moments(), Counts())
        check_requests(requests)
        if every is not None and (isinstance(every, bool) or not isinstance(every, int)):
            raise UsageTypeError(f"{call}: every is a number of device iterations, got {every!r}.")
        if every is not None and every < 1:
            raise UsageValueError(f"{call}: every has to be at least 1, got {every}.")
        if isinstance(budget, bool) or not isinstance(budget, (int, float)):
            raise UsageTypeError(f"{call}: budget is a share such as 0.02, got {budget!r}.")
        if not (math.isfinite(budget) and budget > 0):
            raise UsageValueError(f"{call}: budget has to be above 0, got {budget}.")
        if over not in _OVER:
            raise UsageValueError(f"{call}: over is 'micro_batch' or 'iteration', got {over!r}.")
        if when is not None and not callable(when):
            raise UsageTypeError(f"{call}: when is a function of a Record, got {when!r}.")
        if then != "stop" and not callable(then):
            raise UsageTypeError(f"{call}: then is 'stop' or a function of a Record, got {then!r}.")
        if then != "stop" and when is None:
            raise UsageTypeError(
                f"{call}: then is called with the records for which when is true, and there is no "
                "when. Pass when=lambda record: True to get all records, or leave then out."
            )
        if self._why_no_anchors:
            raise UsageAttributeError(f"{call}: {self._why_no_anchors}")
        for known in self._observations:
            if known.every != every:
                raise UsageAssertionError(
                    f"{call}: every={every}, and an earlier call has every={known.every}. One "
                    "version of the program computes all statistics: pass the same to all calls."
                )
        self._observations.append(
            Observation(
                *(select, tuple(requests), every, float(budget), over == "iteration", when),
                None if then == "stop" else then,
            )
        )
        return self
