"""Changes to PyTorch's own Python code that apply while a model is traced."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function

from popsim_torch.ops import op_listener
from popsim_torch.private_torch.autograd import JACOBIAN_IN_FORWARD_MODE
from popsim_torch.private_torch.distributions import validates_arguments
from popsim_torch.private_torch.modules import MASK_DETECTION, nested_traces
from popsim_torch.shared_scope import SharedScope
from popsim_torch.trace.call_arguments import warn_of_no_device
from popsim_torch.trace.checkpoints import rebuilding_checkpoints
from popsim_torch.trace.cumulative_norm import cumulative_norm
from popsim_torch.trace.graph.device import DEVICE
from popsim_torch.trace.graph.traced_tensors import host_computation
from popsim_torch.trace.host_reads import noticed_host_reads
from popsim_torch.trace.module_casts import converted_modules
from popsim_torch.trace.padded_encoders import padded_encoders
from popsim_torch.trace.repeated_updates import repeated_norms


@contextmanager
def adapted_torch() -> Iterator[None]:
    """Change PyTorch's Python code in this scope so that it can be traced."""
    with ExitStack() as stack:
        for adaptation in _ADAPTATIONS:
            stack.enter_context(adaptation())
        yield


@contextmanager
def _without_validation() -> Iterator[None]:
    """Turn off the checks of ``torch.distributions``, which read values."""
    distribution = torch.distributions.Distribution
    saved = validates_arguments()
    distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        distribution.set_default_validate_args(saved)


def _without_mask_detection() -> AbstractContextManager[Any]:
    """Keep ``nn.TransformerEncoder`` from reading its mask to find out whether it is causal.

    The result would only choose a faster kernel; the mask is applied in any case.
    """
    return mock.patch.object(
        *MASK_DETECTION,
        lambda mask, is_causal=None, size=None: is_causal is True,
    )


eager_stance = SharedScope(lambda: torch.compiler.set_stance("force_eager"))
"""Functions that ``torch.compile`` wraps run without compilation, in all threads."""


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Run functions that ``torch.compile`` wraps without compilation, so that they are traced."""
    with (
        warnings.catch_warnings(),
        eager_stance,
        nested_traces(),
    ):
        # The hooks belong to the recorder, which needs every call.
        warnings.filterwarnings("ignore", r"Using `torch.compile\(module\)` when there are global")
        yield


def _with_range_on_device() -> AbstractContextManager[Any]:
    """Make ``torch.range`` return a tensor of the device: no mode sees that function."""
    on_host = torch.range

    def on_device(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if op_listener.get() is None:  # called by another thread, or on the host
            return on_host(*args, device=device, **kwargs)
        with host_computation(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated; the warning would name this line
            values: torch.Tensor = on_host(*args, **kwargs)
        if device is None:
            warn_of_no_device("range")
        return values if torch.device(device or DEVICE).type == "cpu" else values.to(DEVICE)

    return mock.patch.object(torch, "range", on_device)


def _with_weights_of_l1_loss() -> AbstractContextManager[Any]:
    """Let ``F.l1_loss`` have its weights: PyTorch does not pass them on to a mode."""

    def with_weights(function: Any, relevant: Any, *args: Any, **kwargs: Any) -> Any:
        if function is F.l1_loss and len(relevant) > 2 and relevant[2] is not None:
            kwargs["weight"] = relevant[2]
        return handle_torch_function(function, relevant, *args, **kwargs)

    return mock.patch.object(F, "handle_torch_function", with_weights)


def _with_reverse_jacobians() -> AbstractContextManager[Any]:
    """Let ``torch.autograd.functional`` compute in reverse mode what it computes in forward mode.

    Its forward mode runs in an older ``vmap``, whose tensors no trace can follow.
    """
    in_forward_mode = getattr(*JACOBIAN_IN_FORWARD_MODE)

    jacobian: Any = torch.autograd.functional.jacobian

    def in_reverse_mode(
        func: Any, inputs: Any, strict: bool = False, vectorize: bool = False
    ) -> Any:
        if strict or not vectorize:  # PyTorch refuses it
            return in_forward_mode(func, inputs, strict, vectorize)
        return jacobian(func, inputs, create_graph=True, vectorize=True)

    return mock.patch.object(*JACOBIAN_IN_FORWARD_MODE, in_reverse_mode)


_ADAPTATIONS: tuple[Callable[[], AbstractContextManager[Any]], ...] = (
    _without_validation,
    _without_mask_detection,
    _without_compiler,
    rebuilding_checkpoints,
    _with_range_on_device,
    repeated_norms,
    cumulative_norm,
    noticed_host_reads,
    padded_encoders,
    converted_modules,
    _with_weights_of_l1_loss,
    _with_reverse_jacobians,
)
