"""Blocks, stages and execution strategies, with which the user divides a model into parts.

A model marks its parts with *blocks* while its ``forward`` runs; an *execution strategy* assigns
the blocks to *stages*, and every stage has an IPU. This changes no values.

Blocks report to the listener in :data:`block_listener`. While a model is traced the listener is the
tracer, which asks a :class:`StageAssigner` for the stage of the current operation. Outside of a
trace there is no listener, and blocks do nothing.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from types import TracebackType
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from torch import nn

from popsim_torch.errors import Error, UsageAssertionError, UsageTypeError, UsageValueError
from popsim_torch.private_torch.module_parts import forward_pre_hooks, own_modules
from popsim_torch.stages.strategies import ExecutionStrategy
from popsim_torch.tables import Described

__all__ = [
    "BeginBlock",
    "Block",
    "BlockFunction",
    "BlockListener",
    "StageAssigner",
    "block_listener",
    "module_repr",
    "removeBlocks",
]

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=nn.Module)


class BlockListener(Protocol):
    """Receives the beginning and the end of each block and stage."""

    def begin(self, user_id: str | None, ipu_id: int | None) -> None:
        """Enter a block, and leave the previous one.

        Args:
            user_id: The block's id, or None for the next automatic one.
            ipu_id: The IPU the user asked for, if any.
        """

    def end(self) -> None:
        """Leave the block; no block is active until the next ``begin``."""

    def begin_stage(self, stage_id: int) -> None:
        """Enter a stage, and leave the previous block or stage.

        Args:
            stage_id: The number of the stage.
        """

    def return_to_stage(self, stage_id: int) -> None:
        """Go on with a stage that was entered before.

        Args:
            stage_id: Its number.
        """


block_listener: ContextVar[BlockListener | None] = ContextVar("block_listener", default=None)
"""The listener that blocks report to; None outside of a trace."""


class _AutomaticIds:
    """The automatic block ids "0", "1", ... of one listener, which means of one trace."""

    def __init__(self, listener: BlockListener) -> None:
        self._listener = weakref.ref(listener)
        self._next = 0

    def belong_to(self, listener: BlockListener) -> bool:
        return self._listener() is listener

    def take(self) -> str:
        """Return the next id."""
        self._next += 1
        return str(self._next - 1)

    def claim(self, automatic_id: str) -> None:
        """Reserve an id that an earlier trace gave to a module."""
        self._next = max(self._next, int(automatic_id) + 1)

    def restart(self) -> None:
        """Start again at "0"."""
        self._next = 0


_automatic_ids: ContextVar[_AutomaticIds | None] = ContextVar("_automatic_ids", default=None)


def _automatic_ids_of(listener: BlockListener) -> _AutomaticIds:
    ids = _automatic_ids.get()
    if ids is None or not ids.belong_to(listener):
        ids = _AutomaticIds(listener)
        _automatic_ids.set(ids)
    return ids


def _begin(user_id: str | None, ipu_id: int | None) -> None:
    listener = block_listener.get()
    if listener is not None:
        listener.begin(user_id or _automatic_ids_of(listener).take(), ipu_id)


def _checked_ids(
    where: str, user_id: str | int | None, ipu_id: int | None
) -> tuple[str | None, int | None]:
    """Return a block's ids in the form for listeners; a falsy ``user_id`` means None."""
    if user_id is not None and not isinstance(user_id, (str, int)):
        raise UsageTypeError(
            f"{where}: user_id={user_id!r} is a {type(user_id).__name__}. "
            "Pass a string or an int, or leave it out for an automatic id."
        )
    if ipu_id is not None:
        try:
            ipu_id = operator.index(ipu_id)
        except TypeError:
            raise UsageTypeError(
                f"{where}: ipu_id={ipu_id!r} is a {type(ipu_id).__name__}. Pass an int."
            ) from None
        if ipu_id < 0:
            raise UsageValueError(
                f"{where}: ipu_id={ipu_id} is negative. IPUs are numbered from 0."
            )
    return (str(user_id) if user_id else None), ipu_id


class Block(Described):
    """Assign the operations inside a ``with`` statement to one block.

    When the statement ends, no block is active, not even an enclosing one; an operation outside of
    all blocks is then an error. Outside of a trace blocks do nothing.

    Args:
        user_id: The block's id; the same id always means the same block. None (or any falsy value)
            means the next automatic id, "0", "1", ... in order of entry.
        ipu_id: The IPU to run on, unless the block's ``Stage`` names one.

    Raises:
        UsageTypeError: An id has a wrong type.
        UsageValueError: ``ipu_id`` is negative.

    Example:
        ::

            def forward(self, x):
                with poptorch.Block("front", ipu_id=0):
                    x = self.layer1(x)
                with poptorch.Block("back", ipu_id=1):
                    return self.layer2(x)
    """

    def __init__(self, user_id: str | int | None = None, ipu_id: int | None = None) -> None:
        self._user_id, self._ipu_id = _checked_ids("Block", user_id, ipu_id)

    def __repr__(self) -> str:
        return f"Block({', '.join(f'{name}={x!r}' for name, x in self._figures().items())})"

    def _figures(self) -> dict[str, object]:
        given = {"user_id": self._user_id, "ipu_id": self._ipu_id}
        return {name: value for name, value in given.items() if value is not None}

    def __enter__(self) -> None:
        _begin(self._user_id, self._ipu_id)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        listener = block_listener.get()
        if listener is not None:
            listener.end()

    @staticmethod
    def start(user_id: str | int | None = None, ipu_id: int | None = None) -> None:
        """Begin a block that lasts until the next one begins.

        Args:
            user_id: As for the class.
            ipu_id: As for the class.

        Raises:
            UsageTypeError: An id has a wrong type.
            UsageValueError: ``ipu_id`` is negative.
        """
        _begin(*_checked_ids("Block.start", user_id, ipu_id))

    @staticmethod
    def useAutoId() -> None:
        """Restart the automatic ids at "0"; call it first in ``forward``.

        Every trace starts at "0" by itself, so this has an effect only within one ``forward``.
        """
        listener = block_listener.get()
        if listener is not None:
            _automatic_ids_of(listener).restart()


class _BeginBlockHook:
    """The forward pre-hook of a marked module; a class, because it must be picklable."""

    def __init__(self, user_id: str | None, ipu_id: int | None) -> None:
        self._user_id = user_id
        self._ipu_id = ipu_id
        self._is_automatic = user_id is None

    def __call__(self, *_: object) -> None:
        """Begin the block; an automatic id is chosen the first time, and then kept."""
        listener = block_listener.get()
        if listener is None:
            return
        if self._is_automatic:
            ids = _automatic_ids_of(listener)
            if self._user_id is None:
                self._user_id = ids.take()
            else:
                ids.claim(self._user_id)
        listener.begin(self._user_id, self._ipu_id)

    def __repr__(self) -> str:
        return f"BeginBlock(user_id={self._user_id}, ipu_id={self._ipu_id})"


def _block_hooks(module: nn.Module) -> dict[int, _BeginBlockHook]:
    hooks = forward_pre_hooks(module)
    return {key: hook for key, hook in hooks.items() if isinstance(hook, _BeginBlockHook)}


class _Call(nn.Module):
    """A module that wraps a callable which is not a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the callable."""
        return self._function(*args, **kwargs)


@overload
def BeginBlock(
    layer_to_call: M, user_id: str | int | None = None, ipu_id: int | None = None
) -> M: ...
@overload
def BeginBlock(
    layer_to_call: Callable[P, R], user_id: str | int | None = None, ipu_id: int | None = None
) -> nn.Module: ...
def BeginBlock(
    layer_to_call: Any, user_id: str | int | None = None, ipu_id: int | None = None
) -> Any:
    """Mark a module: a block begins when the module is called, and continues after it.

    Args:
        layer_to_call: A module, which gets a forward pre-hook, or another callable, which is
            wrapped.
        user_id: The block's id. None means the next automatic id; a module keeps the id of the
            first trace.
        ipu_id: The IPU to run on, unless the block's ``Stage`` names one.

    Returns:
        The module itself, with the same class and parameter names; for another callable, a module
        that begins the block and calls the callable.

    Raises:
        Error: The module is already marked, or ``layer_to_call`` cannot be called.
        UsageTypeError: An id has a wrong type.
        UsageValueError: ``ipu_id`` is negative.
    """
    hook = _BeginBlockHook(*_checked_ids("BeginBlock", user_id, ipu_id))
    if isinstance(layer_to_call, nn.Module):
        for present in _block_hooks(layer_to_call).values():
            raise Error(
                f"BeginBlock: this {type(layer_to_call).__name__} has already been assigned to a "
                f"block: {present!r}. To assign it again, call removeBlocks on it first."
            )
        layer_to_call.register_forward_pre_hook(hook)
        return layer_to_call
    if not callable(layer_to_call):
        raise Error(
            f"BeginBlock: got a {type(layer_to_call).__name__}. Pass a torch.nn.Module or a "
            "callable."
        )

    return BeginBlock(_Call(layer_to_call), user_id, ipu_id)


def BlockFunction(
    user_id: str | int | None = None, ipu_id: int | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that runs the body of a function inside a :class:`Block`.

    Args:
        user_id: As for ``Block``; every call takes a new automatic id.
        ipu_id: As for ``Block``.

    Raises:
        UsageTypeError: An id has a wrong type.
        UsageValueError: ``ipu_id`` is negative.
    """
    block = Block(user_id, ipu_id)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run_in_block(*args: P.args, **kwargs: P.kwargs) -> R:
            with block:
                return function(*args, **kwargs)

        return run_in_block

    return decorate


def removeBlocks(module: nn.Module) -> None:
    """Remove the marks of ``BeginBlock`` from a module and all modules in it.

    Args:
        module: The module; it can be marked again after that.

    Raises:
        UsageAssertionError: ``module`` is not a ``torch.nn.Module``.
    """
    if not isinstance(module, nn.Module):
        raise UsageAssertionError(
            f"removeBlocks: got a {type(module).__name__}. Pass a torch.nn.Module."
        )
    for part in module.modules():
        for key in _block_hooks(part):
            del forward_pre_hooks(part)[key]


def module_repr(module: nn.Module) -> str:
    """Return the tree of modules as a string, with ``BeginBlock`` marks before module names.

    Args:
        module: The module at the top of the tree.
    """
    details = module.extra_repr()
    lines = details.split("\n") if details else []
    is_short = not own_modules(module) and len(lines) <= 1
    lines += [f"({name}): {module_repr(part)}" for name, part in module.named_children()]
    marks = [repr(hook) for hook in _block_hooks(module).values()]
    title = " ".join([*marks, type(module).__name__])
    if is_short:
        return f"{title}({''.join(lines)})"
    body = "\n".join(lines).replace("\n", "\n  ")
    return f"{title}(\n  {body}\n)"


class StageAssigner:
    """Compute, block by block, the stage and the IPU of the operations in a trace.

    Operations before the first block belong to stage 0 on IPU 0. One assigner is used for one
    trace. If stages run one after another, a block may be on an earlier stage than the previous
    block: its operations then run together with the last stage that has begun.

    Args:
        strategy: The strategy of the options.

    Raises:
        UsageTypeError: ``strategy`` is not an execution strategy.
    """

    def __init__(self, strategy: ExecutionStrategy) -> None:
        if not isinstance(strategy, ExecutionStrategy):
            raise UsageTypeError(
                f"StageAssigner: got a {type(strategy).__name__}. Pass an execution strategy."
            )
        self._strategy = strategy
        self._blocks: dict[str, tuple[int, int]] = {}
        self._current: tuple[int, int] | None = (0, 0)
        self._ipu_ids: list[int] = []
        self._last_stage = 0

    @property
    def ipu_ids(self) -> tuple[int, ...]:
        """The IPU of every block in order of entry, for :func:`count_stages`."""
        return tuple(self._ipu_ids)

    @property
    def num_stages(self) -> int:
        """The number of stages: one more than the highest stage of a block."""
        return 1 + max(stage for stage, _ in [(0, 0), *self._blocks.values()])

    def position(self, stage_id: int) -> int:
        """Return the position of a stage in the pipeline; concurrent stages have the same one."""
        return self._strategy.position(stage_id)

    @property
    def positions(self) -> tuple[int, ...]:
        """The position of each stage in the pipeline; empty if no stages are concurrent."""
        found = tuple(map(self.position, range(self.num_stages)))
        return () if found == tuple(range(len(found))) else found

    @property
    def ipu_of_stage(self) -> dict[int, int]:
        """The first IPU of each stage."""
        places = dict(reversed(self._blocks.values()))
        return {0: 0, **places}

    def begin(self, user_id: str | None, ipu_id: int | None) -> None:
        """Enter a block.

        Args:
            user_id: The block's id, or None for the next automatic one.
            ipu_id: The IPU the user asked for, if any.

        Raises:
            UsageAssertionError: The strategy lists its blocks, but not this one, or it needs an IPU
                and none is given.
            Error: The block was on another IPU before, or the strategy cannot use that IPU.
        """
        block = user_id or _automatic_ids_of(self).take()
        known = self._blocks.get(block)
        if known and ipu_id is None:
            place = known
        else:
            place = self._strategy.place(block, ipu_id, self._blocks)
        if known and place != known:
            raise Error(
                f"Block '{block}': asked to run on IPU {ipu_id}, but it was on IPU {known[1]} "
                "before. The same id always means the same block: use another id."
            )
        self._blocks[block] = place
        self._enter(place)
        self._ipu_ids.append(place[1])

    def begin_stage(self, stage_id: int) -> None:
        """Enter a stage by its number.

        Args:
            stage_id: The number of the stage.

        Raises:
            Error: The strategy has no such stage.
        """
        place = self._strategy.place_stage(stage_id)
        self._blocks[f"PipelineStage({stage_id})"] = place
        self._enter(place)
        self._ipu_ids.append(place[1])

    def return_to_stage(self, stage_id: int) -> None:
        """Go on with a stage that was entered before.

        Args:
            stage_id: Its number.
        """
        self._enter(self._blocks[f"PipelineStage({stage_id})"])

    def _enter(self, place: tuple[int, int]) -> None:
        self._last_stage = max(self._last_stage, place[0])
        self._current = place if self._strategy.is_pipelined else (self._last_stage, place[1])

    def end(self) -> None:
        """Leave the block; until the next one begins, an operation is an error."""
        self._current = None

    def current_stage(self) -> int:
        """Return the stage of an operation at this point.

        Raises:
            Error: The previous block has ended and no other has begun.
        """
        return self._active()[0]

    def current_ipu(self) -> int:
        """Return the IPU of an operation at this point.

        Raises:
            Error: The previous block has ended and no other has begun.
        """
        return self._active()[1]

    def _active(self) -> tuple[int, int]:
        if self._current is None:
            raise Error(
                "No active Block, all the ops must belong to a Block. An op follows the end of a "
                "`with Block(...)` outside any other: move it into a block, or use Block.start or "
                "BeginBlock, whose blocks last until the next one begins."
            )
        return self._current
