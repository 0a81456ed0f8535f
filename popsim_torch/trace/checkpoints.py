"""``torch.utils.checkpoint`` in a traced model: the backward pass recomputes what it wraps.

The function runs once, as if it was called directly, in a region of its own
(``ops.OpListener.rebuilt_region``). The program then repeats the region's ops in the backward pass
(``passes/recompute.py``). Random numbers and all other values are the same the second time, so
there is nothing to check. Running statistics of norms are updated again (``repeated_updates.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, noop_context_fn

from popsim_torch.ops import op_listener
from popsim_torch.private_torch.modes import TorchDispatchMode
from popsim_torch.private_torch.modules import (
    CHECKPOINT_GENERATORS,
    CachingTorchDispatchMode,
    determinism_checks,
)
from popsim_torch.private_torch.trees import tree_iter
from popsim_torch.trace.graph.traced_tensors import is_traced
from popsim_torch.trace.repeated_updates import note_kept, repeated_updates

_REBUILT = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE, False)


@contextmanager
def rebuilding_checkpoints() -> Iterator[None]:
    """Let ``torch.utils.checkpoint`` open a region of the trace and call its function in it."""
    generators: dict[str, Any] = dict.fromkeys(CHECKPOINT_GENERATORS, _checkpointed)
    with mock.patch.multiple(
        torch.utils.checkpoint, CheckpointFunction=_ReentrantCheckpoint, **generators
    ):
        yield


def _region(*, reentrant: bool) -> AbstractContextManager[object]:
    listener = op_listener.get()
    if listener is None:
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(repeated_updates(reentrant=reentrant))
    stack.enter_context(listener.rebuilt_region())
    return stack


def _checkpointed(
    _function: Callable[..., Any],
    _preserve_rng_state: bool = True,
    context_fn: Callable[[], Any] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    _early_stop: bool = True,
    *_args: Any,
    **_kwargs: Any,
) -> Iterator[None]:
    """Replace the code that ``checkpoint(use_reentrant=False)`` runs around the function.

    The Python function runs only once, so the second context of ``context_fn`` is not entered, and
    neither random numbers nor metadata have to be compared.
    """
    allowed = list(determinism_checks)
    if determinism_check not in allowed:
        raise ValueError(
            f"determinism_check should be one of {allowed}, but got {determinism_check}"
        )
    if debug and context_fn is not noop_context_fn:
        raise ValueError("debug=True is incompatible with non-default context_fn")
    with ExitStack() as stack:
        if torch.is_grad_enabled():
            stack.enter_context(_region(reentrant=False))
            stack.enter_context(_forward_context(context_fn))
        yield


def _forward_context(context_fn: Callable[[], Any]) -> Any:
    """Return the context in which the function runs; a replacement for PyTorch's own policies."""
    context, _ = context_fn()
    if isinstance(context, CachingTorchDispatchMode):
        return _KeepingSelected(context.policy_fn)
    return context


class _KeepingSelected(TorchDispatchMode):
    """Keeps the results of the operators in a region that a policy wants to save.

    Args:
        policy: A policy, as for ``create_selective_checkpoint_contexts``.
    """

    def __init__(self, policy: Callable[..., CheckpointPolicy | bool]) -> None:
        super().__init__()
        self._policy = policy

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and keep its results if the policy says so."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        listener = op_listener.get()
        if func in torch.utils.checkpoint.SAC_IGNORED_OPS:
            return result
        context = SelectiveCheckpointContext(is_recompute=False)
        context.op_output = result  # (older versions of PyTorch do not take it)
        policy = self._policy(context, func, *args, **kwargs)
        if listener is not None and policy not in _REBUILT:
            note_kept()
            for value in tree_iter(result):
                if is_traced(value):
                    listener.checkpoint(value)
        return result


class _ReentrantCheckpoint:
    """Replaces the autograd function of ``checkpoint(use_reentrant=True)``."""

    @staticmethod
    def apply(function: Callable[..., Any], _preserve_random_state: bool, *args: Any) -> Any:
        """Call the function; as in PyTorch, without gradients if no argument needs one."""
        needs_gradient = any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in tree_iter(args)
        )
        with _region(reentrant=True) if needs_gradient else torch.no_grad():
            return function(*args)
