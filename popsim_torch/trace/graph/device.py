"""The device type ``ipu`` for PyTorch's front end while a model is traced.

The C++ library gives PyTorch a device guard. This file has the rest: a module ``torch.ipu`` for
code that looks for one per device, and result shapes of operators that PyTorch can run but not
infer.
"""

from __future__ import annotations

import types
from typing import Any

import torch

import popsim_torch._native  # noqa: F401  (the device guard)
from popsim_torch.private_torch.devices import register_device_module
from popsim_torch.private_torch.fake import (
    FakeTensor,
    FakeTensorMode,
    register_op_impl,
    unset_fake_temporarily,
)
from popsim_torch.private_torch.proxies import disable_proxy_modes_tracing
from popsim_torch.private_torch.trees import tree_map

DEVICE = torch.device("ipu", 0)

aten = torch.ops.aten

# Operators without a shape rule in PyTorch. Their shapes do not depend on values.
_RUN_FOR_SHAPES = (
    aten.multi_margin_loss.default,
    aten.multi_margin_loss_backward.default,
    aten.multilabel_margin_loss_forward.default,
    aten.multilabel_margin_loss_backward.default,
)


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


def _register_shape_rules() -> None:
    for operator in _RUN_FOR_SHAPES:

        @register_op_impl(operator)
        def run(fake_mode: FakeTensorMode, function: Any, *args: Any, **kwargs: Any) -> Any:
            device = next(value.device for value in args if isinstance(value, FakeTensor))
            results = on_cpu_zeros(function, args, kwargs)
            with fake_mode:
                return tree_map(
                    lambda result: torch.empty(result.shape, dtype=result.dtype, device=device),
                    results,
                )


if not hasattr(torch, "ipu"):
    register_device_module("ipu", _device_module())
_register_shape_rules()
