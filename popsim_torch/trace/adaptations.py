"""What PyTorch's own Python code does otherwise while a model is traced."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch.utils.checkpoint
from torch.utils._pytree import tree_iter

from popsim_torch.trace.call_arguments import warn_of_no_device
from popsim_torch.trace.cumulative_norm import cumulative_norm
from popsim_torch.trace.device import DEVICE
from popsim_torch.trace.traced_tensors import host_computation


@contextmanager
def adapted_torch() -> Iterator[None]:
    """Let PyTorch's Python code run in a way that can be traced."""
    with ExitStack() as stack:
        for adaptation in _ADAPTATIONS:
            stack.enter_context(adaptation())
        yield


@contextmanager
def _without_validation() -> Iterator[None]:
    """Turn off the checks of ``torch.distributions``, which read values."""
    distribution = torch.distributions.Distribution
    saved = distribution._validate_args
    distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        distribution.set_default_validate_args(saved)


def _without_mask_detection() -> AbstractContextManager[Any]:
    """Keep ``nn.TransformerEncoder`` from reading its mask to see whether it is causal.

    It would only choose a faster kernel for it; the mask itself is applied all the same.
    """
    return mock.patch.object(
        torch.nn.modules.transformer,
        "_detect_is_causal_mask",
        lambda mask, is_causal=None, size=None: is_causal is True,
    )


# One for all: each new one stays in the thread's context for good.
_nested_traces: Any = torch._dynamo.config.patch(error_on_nested_fx_trace=False)


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Run what ``torch.compile`` wraps as it was written, and let that be traced."""
    with (
        warnings.catch_warnings(),
        torch.compiler.set_stance("force_eager"),
        _nested_traces,
    ):
        # The hooks are those of the recorder, which has use for every call.
        warnings.filterwarnings("ignore", r"Using `torch.compile\(module\)` when there are global")
        yield


# What PyTorch runs around a checkpointed function: since 2.14 ``..._generator_impl``, beside the
# former name.
_CHECKPOINT_GENERATORS = tuple(
    name
    for name in vars(torch.utils.checkpoint)
    if name.startswith("_checkpoint_without_reentrant_generator")
)


@contextmanager
def _without_checkpointing() -> Iterator[None]:
    """Let ``torch.utils.checkpoint`` call its function as if it was called directly.

    Which values are computed again in the backward pass is decided for the whole program. The
    values are the same.
    """

    def checkpointed(*_args: object, **_kwargs: object) -> Iterator[None]:
        yield  # what is in front of the call, and behind it

    generators: dict[str, Any] = dict.fromkeys(_CHECKPOINT_GENERATORS, checkpointed)
    with mock.patch.multiple(
        torch.utils.checkpoint, CheckpointFunction=_ReentrantCheckpoint, **generators
    ):
        yield


class _ReentrantCheckpoint:
    """Stands for the autograd function behind ``checkpoint(use_reentrant=True)``."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_random_state: bool, *args: Any) -> Any:
        """Call the function; like PyTorch's, without gradients if no argument needs one."""
        needs_gradient = any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in tree_iter(args)
        )
        with nullcontext() if needs_gradient else torch.no_grad():
            return function(*args)


def _with_range_on_device() -> AbstractContextManager[Any]:
    """Make what ``torch.range`` returns a tensor of the device: no mode sees that function."""
    on_host = torch.range

    def on_device(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        with host_computation(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated, which would be said of this line
            values: torch.Tensor = on_host(*args, **kwargs)
        if device is None:
            warn_of_no_device("range")
        return values if torch.device(device or DEVICE).type == "cpu" else values.to(DEVICE)

    return mock.patch.object(torch, "range", on_device)


def _without_autocast() -> AbstractContextManager[Any]:
    """Leave element types as forward has them under ``torch.autocast``, as PopTorch does."""
    return mock.patch.multiple(
        torch.autocast, __enter__=lambda self: self, __exit__=lambda *_: None
    )


_ADAPTATIONS: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
    _without_validation,
    _without_mask_detection,
    _without_compiler,
    _without_checkpointing,
    _with_range_on_device,
    _without_autocast,
    cumulative_norm,
)
