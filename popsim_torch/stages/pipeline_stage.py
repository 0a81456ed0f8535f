"""``PipelineStage``: assigns parts of a model to stages by number.

Inside of a trace a stage reports its number to the listener of blocks. Outside of a trace, layers
that are built inside of a stage are marked with a forward pre-hook, which reports the number when
the layers are called in a trace.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from torch import nn

from popsim_torch.errors import UsageTypeError, UsageValueError
from popsim_torch.private_torch.module_parts import forward_pre_hooks
from popsim_torch.stages.blocks import BlockListener, block_listener

__all__ = ["PipelineStage", "StageMark", "mark_stage", "stage_mark", "unmark_stage"]

P = ParamSpec("P")
R = TypeVar("R")

# The stages around the code that runs now, outermost first, with the listener of each.
_open: ContextVar[tuple[tuple[int, BlockListener | None], ...]] = ContextVar("_open", default=())


class PipelineStage:
    """A stage of a pipeline: a context for calling or building layers, or a decorator.

    Inside of ``forward``, operations in the context belong to the stage. Operations after the
    context belong to the enclosing stage, or, if there is none, still to this stage until another
    one begins. A layer that is *built* in the context keeps the stage, which begins when the layer
    is called; but if another ``PipelineStage`` is open at that time, that one is used. As a
    decorator it opens the context around every call of a function.

    Stages are those of ``PipelinedExecution`` and ``ShardedExecution``: stage ``i`` is on IPU
    ``i``, or on the IPU of the ``i``-th stage that the strategy lists (``device_mapping`` of
    ``set_pipelining_options``). Without an executor stages have no effect.

    Args:
        stage: The number, from 0.

    Raises:
        UsageTypeError: The number is not an int.
        UsageValueError: The number is negative.

    Example:
        ::

            def forward(self, x):
                with poptorch.PipelineStage(0):
                    x = self.layer1(x)
                with poptorch.PipelineStage(1):
                    return self.layer2(x)
    """

    def __init__(self, stage: int) -> None:
        self._stage = checked_stage("PipelineStage", stage)

    @property
    def stage(self) -> int:
        """The number of the stage."""
        return self._stage

    def __enter__(self) -> PipelineStage:
        listener = block_listener.get()
        if listener is not None:
            listener.begin_stage(self._stage)
        else:
            _construction.open()
        _open.set((*_open.get(), (self._stage, listener)))
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _, listener = _open.get()[-1]
        _open.set(_open.get()[:-1])
        if listener is None:
            _construction.close()
            return
        outer = _open.get()
        if outer and outer[-1][1] is listener:
            listener.return_to_stage(outer[-1][0])

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return a function that runs in the stage."""
        if isinstance(function, nn.Module | type) or not callable(function):
            raise UsageTypeError(
                f"PipelineStage({self._stage}): got a {type(function).__name__} to decorate. Pass "
                "a function; build layers inside of `with PipelineStage(...)`, or use "
                "set_pipeline_stage_assignment."
            )

        @functools.wraps(function)
        def run_in_stage(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return function(*args, **kwargs)

        return run_in_stage

    def __repr__(self) -> str:
        return f"PipelineStage({self._stage})"


def checked_stage(where: str, stage: object) -> int:
    """Check and return the number of a stage.

    Args:
        where: The call, for messages.
        stage: The user's value.

    Raises:
        UsageTypeError: The value is not an int.
        UsageValueError: The value is negative.
    """
    if not isinstance(stage, int) or isinstance(stage, bool):
        raise UsageTypeError(
            f"{where}: the stage {stage!r} is a {type(stage).__name__}. Pass an int, from 0."
        )
    if stage < 0:
        raise UsageValueError(
            f"{where}: the stage {stage} is negative. Stages are numbered from 0."
        )
    return int(stage)


class StageMark:
    """The forward pre-hook of a layer that has a stage.

    Attributes:
        stage: The number of the stage.
    """

    def __init__(self, stage: int) -> None:
        self.stage = stage

    def __call__(self, *_: object) -> None:
        """Begin the stage, unless the layer is called inside of another stage."""
        listener = block_listener.get()
        if listener is None or any(told is listener for _, told in _open.get()):
            return
        listener.begin_stage(self.stage)

    def __repr__(self) -> str:
        return f"PipelineStage({self.stage})"


def stage_mark(module: nn.Module) -> StageMark | None:
    """Return the mark of a layer, if it has one.

    Args:
        module: The layer.
    """
    hooks = forward_pre_hooks(module).values()
    return next((hook for hook in hooks if isinstance(hook, StageMark)), None)


def mark_stage(module: nn.Module, stage: int) -> None:
    """Give a layer a stage, in place of an earlier one.

    Args:
        module: The layer.
        stage: The number of the stage.
    """
    unmark_stage(module)
    module.register_forward_pre_hook(StageMark(stage))


def unmark_stage(module: nn.Module) -> None:
    """Remove the stage of a layer.

    Args:
        module: The layer.
    """
    hooks = forward_pre_hooks(module)
    for key in [key for key, hook in hooks.items() if isinstance(hook, StageMark)]:
        del hooks[key]


class _Construction:
    """Marks the layers that are built while stages are open outside of a trace.

    PyTorch has no hook for the construction of a module, so ``nn.Module.__init__`` is replaced
    while stages are open. Other threads are not affected, because the open stages are stored by
    context.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_open = 0
        self._original = nn.Module.__init__

    def open(self) -> None:
        with self._lock:
            self._num_open += 1
            if self._num_open == 1:
                self._original = nn.Module.__init__
                nn.Module.__init__ = self._marking(self._original)  # type: ignore[method-assign]

    def close(self) -> None:
        with self._lock:
            self._num_open -= 1
            if self._num_open == 0:
                nn.Module.__init__ = self._original  # type: ignore[method-assign]

    @staticmethod
    def _marking(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            stages = _open.get()
            if stages and stages[-1][1] is None:
                mark_stage(module, stages[-1][0])

        return init


_construction = _Construction()
