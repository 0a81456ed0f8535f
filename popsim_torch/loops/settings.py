"""The options of a loop: those of its function, and the settings on the models it uses.

The trace depends on the models that a body uses, and on whether it trains. Both are known only
after the trace. So the first trace uses a guess: all objects that the body can reach. If the guess
was wrong, the body is traced again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from popsim_torch.enums import OutputMode
from popsim_torch.errors import Error, UsageValueError
from popsim_torch.executor.reach import Reach
from popsim_torch.executor.replicas import input_groups
from popsim_torch.ir import LoopCounts
from popsim_torch.ops import op_listener
from popsim_torch.options import Options, own_dtype
from popsim_torch.options.model_settings import Owned, changes_of, settings_of
from popsim_torch.options.pipelining import PipeliningOptions
from popsim_torch.trace.books.device_loop import DeviceLoopTrace, UnknownObject

__all__ = ["DeviceLoopPlan", "DeviceLoopSettings", "OtherUse", "Use"]


@dataclass(frozen=True)
class Use:
    """The use of the user's objects in a loop, as far as the options depend on it.

    Attributes:
        owned: The settings on models that the body uses.
        training: Whether the body computes gradients.
        is_guess: Whether no trace of the body has been completed yet.
    """

    owned: tuple[Owned, ...] = ()
    training: bool = False
    is_guess: bool = True


class OtherUse(Exception):
    """Raised when the body uses other models than the trace assumed.

    Attributes:
        use: The models that the body uses.
    """

    def __init__(self, use: Use) -> None:
        super().__init__("the body of a loop uses other models than it was traced for")
        self.use = use


@dataclass(frozen=True)
class DeviceLoopPlan:
    """The settings with which a loop is compiled.

    Attributes:
        use: The use of models that the plan was made for.
        options: The frozen options.
        counts: How often the body runs.
        values: The values that were set on the options, by setter; equal for equal programs.
    """

    use: Use
    options: Options
    counts: LoopCounts
    values: dict[str, Any]


@dataclass(frozen=True)
class DeviceLoopSettings:
    """The settings of a call of a loop.

    Attributes:
        function: The name of the loop function, for messages.
        options: The options of the function that calls the loop.
        owned: Settings of the caller (``poptorch.pipeline``).
        iterations: How often the body runs (count).
        accumulation: Iterations per weight update, as the user passes it (count); None to use the
            settings of models and options.
        takes_models: Whether settings on models concern the loop.
    """

    function: str
    options: Options
    owned: tuple[Owned, ...]
    iterations: int
    accumulation: int | None
    takes_models: bool

    def plan(self, use: Use) -> DeviceLoopPlan:
        """Return the plan with which the loop is compiled.

        Raises:
            Error: Settings contradict one another, or do not fit the loop.
        """
        owned = (*self.owned, *use.owned)
        for one in owned:
            if one.settings.values.get("accumulate_outfeed"):
                raise UsageValueError(
                    f"{self.function}: {one.owner} have accumulate_outfeed=True, which adds up the "
                    "outputs of a model's call. A loop has no such outputs: leave it out, "
                    "or pass accumulate_outfeed=True to poptorch.pipeline."
                )
        if use.training and self.accumulation is not None:
            asked = {"gradient_accumulation_steps_per_replica": self.accumulation}
            own_count = Owned(self.function, PipeliningOptions(asked, None))
            owned = (*self.owned, own_count, *use.owned)
        changes = changes_of(self.options, owned, training=use.training)
        own = self.options.clone()
        for _, change in changes.values():
            change.write(own)
        if self.owned and own.Training.gradient_accumulation_dtype is None:
            own.Training.gradientAccumulationDtype(own_dtype)  # the default of a pipeline
        count: int = own.Training.gradient_accumulation if use.training else self.accumulation or 1
        self._check_multiple(count)
        own.deviceIterations(self.iterations // count)
        own.Training.gradientAccumulation(count)
        own.outputMode(OutputMode.Final)
        values = {name: change.value for name, (_, change) in changes.items()}
        counts = LoopCounts(
            self.iterations // count, count, own.replication_factor, input_groups(own)
        )
        return DeviceLoopPlan(use, own.freeze(), counts, values)

    def guess(self, found: Reach) -> DeviceLoopPlan:
        """Return a plan for all objects in reach of the body; if there is none, for no objects."""
        if not self.takes_models:
            return self.plan(Use())
        with contextlib.suppress(Error):
            owned = (one for _, one in settings_of(_modules(found)))
            return self.plan(Use(tuple(owned), bool(found.optimizers)))
        return self.plan(Use())

    @contextlib.contextmanager
    def watched(self, plan: DeviceLoopPlan, found: Reach) -> Iterator[None]:
        """Observe which objects the body uses during a trace in this scope.

        Raises:
            OtherUse: The body needs another plan.
        """
        listener: Any = op_listener.get()
        trace: DeviceLoopTrace = listener.loop
        try:
            yield
        except UnknownObject:
            raise
        except Exception:
            # The error may come from a model that can be reached but is not used.
            used = _used(trace, found)
            if plan.use.is_guess and any(one not in used for one in plan.use.owned):
                raise OtherUse(Use(used, plan.use.training)) from None
            raise
        if self.takes_models:
            use = Use(_used(trace, found), trace.has_backward, is_guess=False)
            if not self._is_planned(plan, use):
                raise OtherUse(use)

    def _is_planned(self, plan: DeviceLoopPlan, use: Use) -> bool:
        try:
            needed = self.plan(use)
        except Error:
            return False
        return (needed.counts, needed.values) == (plan.counts, plan.values)

    def _check_multiple(self, accumulation: int) -> None:
        if self.iterations % accumulation:
            lower = self.iterations - self.iterations % accumulation
            raise UsageValueError(
                f"{self.function}: n = {self.iterations} is not a multiple of "
                f"gradient_accumulation = {accumulation}. The nearest "
                f"multiples are {lower} and {lower + accumulation}."
            )


def _modules(found: Reach) -> list[nn.Module]:
    return [*found.met, *found.modules.values()]


def _used(trace: DeviceLoopTrace, found: Reach) -> tuple[Owned, ...]:
    """Return the settings on models if the body calls a part or updates a weight of the model."""
    updated = {
        id(trace.parameters[name]) for step in trace.steps.values() for name in step.gradients
    }
    return tuple(
        owned
        for module, owned in settings_of([*_modules(found), *trace.called.values()])
        if any(id(part) in trace.called for part in module.modules())
        or any(id(one) in updated for one in nn.Module.parameters(module))
    )
