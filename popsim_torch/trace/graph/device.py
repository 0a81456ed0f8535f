"""The device type ``ipu`` for PyTorch's front end while a model is traced.

The C++ library gives PyTorch a device guard. This file has the rest: a module ``torch.ipu`` for
code that looks for one per device, and result shapes of operators that PyTorch can run but not
infer.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch

import popsim_torch._native  # noqa: F401  (the device guard)
from popsim_torch.private_torch.devices import register_device_module
from popsim_torch.private_torch.fake import (
    FAKE_RULES,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    register_op_impl,
    unset_fake_temporarily,
)
from popsim_torch.private_torch.operators import OpOverload
from popsim_torch.private_torch.proxies import disable_proxy_modes_tracing
from popsim_torch.private_torch.trees import tree_leaves, tree_map

DEVICE = torch.device("ipu", 0)

aten = torch.ops.aten

# Operators whose shape rule in PyTorch differs from what they do on a CPU, or that have none: these
# are found when they are called. Their shapes do not depend on values.
_RUN_FOR_SHAPES = (
    aten.multi_margin_loss.default,
    aten.multi_margin_loss_backward.default,
    aten.multilabel_margin_loss_forward.default,
    aten.multilabel_margin_loss_backward.default,
)
_LEAST_SQUARES = aten.linalg_lstsq.default


def _device_module() -> types.ModuleType:
    """Return ``torch.ipu``: a device without a random number state on the host."""
    module: Any = types.ModuleType("torch.ipu", "The simulated IPU of popsim_torch.")
    module._initialized = False
    module.is_available = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    result: types.ModuleType = module
    return result


def on_cpu_zeros(function: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a function on CPU tensors of zeros: for its shapes and dtypes.

    Args:
        function: An ATen operator.
        args: Positional arguments, fake tensors among them.
        kwargs: Keyword arguments.
    """

    def zeros(value: Any) -> Any:
        if isinstance(value, FakeTensor):
            return torch.zeros(value.shape, dtype=value.dtype, device="cpu")
        return value

    with disable_proxy_modes_tracing(), unset_fake_temporarily():
        args, kwargs = tree_map(zeros, (args, kwargs))
        return function(*args, **kwargs)


def is_sparse(value: Any) -> bool:
    """Return whether a value is a tensor whose elements are not all in memory."""
    return isinstance(value, torch.Tensor) and value.layout is not torch.strided


def run_for_shapes(operator: OpOverload) -> None:
    """From now on, compute the shapes of an operator's results with the operator itself.

    Args:
        operator: An operator of PyTorch that does not change its arguments.
    """
    if operator in FAKE_RULES:
        return

    @register_op_impl(operator)
    def run(fake_mode: FakeTensorMode, function: Any, *args: Any, **kwargs: Any) -> Any:
        given = tree_leaves((args, kwargs))
        device = next((v.device for v in given if isinstance(v, FakeTensor)), DEVICE)
        results = on_cpu_zeros(function, args, kwargs)
        every = tree_leaves(results)
        if any(is_sparse(one) or not isinstance(one, torch.Tensor) for one in every):
            raise UnsupportedOperatorException(function)
        with fake_mode:
            return tree_map(
                lambda result: torch.empty(result.shape, dtype=result.dtype, device=device),
                results,
            )


if not hasattr(torch, "ipu"):
    register_device_module("ipu", _device_module())


def has_fixed_shapes(operator: OpOverload, kwargs: Mapping[str, Any]) -> bool:
    """Return whether the shapes of a call's results are known, although the operator's are not.

    Args:
        operator: An operator whose shapes depend on values.
        kwargs: The keyword arguments of the call.
    """
    # These drivers need matrices of full rank, or do not compute what the rank decides.
    return operator is _LEAST_SQUARES and kwargs.get("driver") in (None, "gels", "gelsy")


@register_op_impl(_LEAST_SQUARES)
def _least_squares(
    fake_mode: FakeTensorMode,
    function: Any,
    a: torch.Tensor,
    b: torch.Tensor,
    rcond: float | None = None,
    *,
    driver: str | None = None,
) -> Any:
    if not has_fixed_shapes(function, {"driver": driver}):
        raise DynamicOutputShapeException(function)
    with disable_proxy_modes_tracing(), unset_fake_temporarily():
        matrices = torch.eye(*a.shape[-2:], dtype=a.dtype).expand(a.shape)
        results = function(matrices, torch.zeros(b.shape, dtype=b.dtype), driver=driver)
    with fake_mode:
        return [torch.empty_like(result, device=a.device) for result in results]


for _operator in _RUN_FOR_SHAPES:
    run_for_shapes(_operator)
