"""``torch.autocast`` in a traced model: operators are cast as PyTorch's lists say.

PyTorch has no kernels of autocast for this device. Those defined here apply the policies of
``autocast_policies.py``. They are above autograd, so a gradient is cast back to the dtype of its
weight. Regions for the device types ``cpu``, ``cuda`` and ``ipu`` all mean this device.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from popsim_torch import logs
from popsim_torch.dtypes import held_dtype
from popsim_torch.ops import op_listener
from popsim_torch.private_torch.autocasts import (
    CAST_INPUTS,
    DISPATCH_KEY,
    below_autocast,
    without_autocast,
)
from popsim_torch.trace.autocast_policies import (
    Policy,
    cast_arguments,
    is_cast,
    policies_of,
    refused,
    with_dtype,
)
from popsim_torch.trace.graph.origin import user_line
from popsim_torch.trace.graph.traced_tensors import in_transform, is_traced
from popsim_torch.typed_torch import new_library

__all__ = ["as_autocast", "autocast_regions", "warn_of_autocast_around"]

_DEVICE = "ipu"
_DEVICES = ("cpu", "cuda", _DEVICE)


@dataclass(frozen=True)
class _Region:
    """A region in which autocast is on or off.

    Attributes:
        device: The device type that the user has named.
        dtype: The lower precision.
        is_on: Whether operators are cast.
        caches: Whether the cast of a weight is used again.
    """

    device: str
    dtype: torch.dtype
    is_on: bool
    caches: bool


@dataclass
class _Regions:
    """The regions of one trace, from outside to inside.

    Attributes:
        regions: The regions.
        weights: For each weight and dtype, the weight itself and its cast.
        is_told_of: Whether the user knows that bfloat16 is float32.
        caches: Whether a region uses casts of weights again by default; a recording turns it off.
    """

    regions: list[_Region] = field(default_factory=list)
    weights: dict[tuple[int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = field(
        default_factory=dict
    )
    is_told_of: bool = False
    caches: bool = field(default_factory=torch.is_autocast_cache_enabled)

    def enter(self, region: _Region) -> None:
        """Begin a region."""
        if region.is_on and region.dtype == torch.bfloat16 and not self.is_told_of:
            self.is_told_of = True
            logs.python.warning(
                "torch.autocast with bfloat16%s: the device holds bfloat16 as float32, so this "
                "region computes in float32. Use dtype=torch.float16 for half precision.",
                user_line(" at "),
            )
        if region.is_on:
            _define_kernels()
        self.regions.append(region)
        _switch(region.is_on)

    def leave(self) -> None:
        """End the innermost region."""
        self.regions.pop()
        _switch(bool(self.regions) and self.regions[-1].is_on)
        if not self.regions:
            self.weights.clear()

    def current(self, device: str) -> _Region | None:
        """Return the innermost region, if it was entered for a device type."""
        region = self.regions[-1] if self.regions else None
        return region if region and _DEVICE in (device, region.device) else _same(region, device)

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in another dtype; a weight is cast only once."""
        if tensor.dtype == dtype:
            return tensor
        listener: Any = op_listener.get()
        caches = self.regions[-1].caches and tensor.is_leaf and tensor.requires_grad
        if not caches or in_transform() or listener is None or listener.is_inside_of_body:
            return tensor.to(dtype)
        if not torch.is_grad_enabled() or tensor.dtype != torch.float32:
            return tensor.to(dtype)
        key = id(tensor), dtype
        if key not in self.weights:
            self.weights[key] = tensor, tensor.to(dtype)
        return self.weights[key][1]


def _same(region: _Region | None, device: str) -> _Region | None:
    return region if region and region.device == device else None


def _switch(on: bool) -> None:
    torch.set_autocast_enabled(_DEVICE, on)


_active: list[_Regions] = []
"""The regions of the trace that runs now, if there is one."""


@contextmanager
def autocast_regions() -> Iterator[None]:
    """Let ``torch.autocast`` choose the dtypes of the device's operators in this scope."""
    regions = _Regions()
    _active.append(regions)
    try:
        with ExitStack() as stack:
            for change in (_regions_entered, _settings_read):
                stack.enter_context(change(regions))
            yield
    finally:
        _active.remove(regions)


def _is_traced_here() -> bool:
    """Return whether the code that runs belongs to the trace: not host code, or another thread."""
    return op_listener.get() is not None


@contextmanager
def _regions_entered(regions: _Regions) -> Iterator[None]:
    """Replace the methods of ``torch.autocast``."""
    start, enter, leave = (
        getattr(torch.autocast, name) for name in ("__init__", "__enter__", "__exit__")
    )

    def init(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if not _is_traced_here() or device_type not in _DEVICES:
            start(self, device_type, dtype, enabled, cache_enabled)
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*CUDA is not available")
            start(self, device_type, dtype, enabled, cache_enabled)
        if cache_enabled is None:
            self._cache_enabled = regions.caches
        if device_type == "cuda":  # without CUDA, PyTorch turns the region off
            self._enabled = enabled and self.fast_dtype in (torch.float16, torch.bfloat16)

    def begin(self: Any) -> Any:
        if not _is_traced_here():
            return enter(self)
        regions.enter(
            _Region(self.device, self.fast_dtype, bool(self._enabled), bool(self._cache_enabled))
        )
        return self

    def end(self: Any, *exception: Any) -> Any:
        if not _is_traced_here():
            return leave(self, *exception)
        regions.leave()
        return False

    with mock.patch.multiple(torch.autocast, __init__=init, __enter__=begin, __exit__=end):
        yield


@contextmanager
def _settings_read(regions: _Regions) -> Iterator[None]:
    """Replace the functions that return the settings of the present region."""
    is_enabled, get_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    cast_inputs = getattr(*CAST_INPUTS)

    def enabled(device_type: str = "cuda") -> bool:
        if not _is_traced_here():
            return is_enabled(device_type)
        region = regions.current(device_type)
        return region is not None and region.is_on

    def dtype_of(device_type: str) -> torch.dtype:
        region = regions.current(device_type) if _is_traced_here() else None
        return get_dtype(device_type) if region is None else region.dtype

    def cast(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return cast_inputs(value, _DEVICE if is_traced(value) else device_type, dtype)

    with (
        mock.patch.multiple(
            torch,
            is_autocast_enabled=enabled,
            get_autocast_dtype=dtype_of,
            is_autocast_cpu_enabled=lambda: enabled("cpu"),
            get_autocast_gpu_dtype=lambda: dtype_of("cuda"),
            get_autocast_cpu_dtype=lambda: dtype_of("cpu"),
        ),
        mock.patch.object(*CAST_INPUTS, cast),
    ):
        yield


def warn_of_autocast_around() -> None:
    """Warn of an autocast to float16 around the call that compiles a model."""
    for device in _DEVICES:
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16:
            logs.python.warning(
                "torch.autocast around the call of a compiled model has no effect on it: the model "
                "keeps its dtypes in all calls. To run it in float16, put `with torch.autocast(...)"
                ":` into its forward."
            )
            return


def as_autocast(name: str, arguments: Any) -> Any:
    """Return the arguments of a call that this package replaces, cast as autocast would do.

    Args:
        name: The operator of ATen, with its overload.
        arguments: The arguments of the call, in any structure.
    """
    region = _region_on()
    policy = None if region is None else policies_of(region.device).get(name)
    if region is None or policy not in (Policy.LOWER, Policy.FLOAT32):
        return arguments
    return cast_arguments(policy, held_dtype(region.dtype), _active[-1].cast, arguments)


def _region_on() -> _Region | None:
    regions = _active[-1].regions if _active else []
    return regions[-1] if regions and regions[-1].is_on else None


@functools.cache
def _define_kernels() -> tuple[Any, ...]:
    """Define the kernels of autocast for this device; they exist as long as the result."""
    others = new_library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, DISPATCH_KEY)
    library = new_library("aten", "IMPL")
    for name in sorted({*policies_of("cpu"), *policies_of("cuda")}):
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        library.impl(name, _kernel(name, operator), DISPATCH_KEY, with_keyset=True)
    return library, others


def _kernel(name: str, operator: Any) -> Callable[..., Any]:
    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        region = _region_on()
        policy = None if region is None else policies_of(region.device).get(name)
        if policy is None:  # the operators that it consists of may be cast
            return operator.redispatch(below_autocast(keys), *args, **kwargs)
        with without_autocast():
            if policy == Policy.REFUSED:
                raise refused(name)
            if policy == Policy.FLOAT32_RESULT:
                if name.startswith("norm."):
                    args, kwargs = _norm(args, kwargs)
                else:
                    kwargs = with_dtype(operator, args, kwargs)
            elif region is not None:
                lower = held_dtype(region.dtype)
                args, kwargs = cast_arguments(policy, lower, _active[-1].cast, (args, kwargs))
            return operator(*args, **kwargs)

    return run


def _norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``torch.norm``, which has no optional dtype, for a float32 result."""
    first = args[0].float() if is_cast(args[0]) else args[0]
    return (first, *args[1:]), kwargs
