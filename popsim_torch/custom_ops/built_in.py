"""Built-in operators with names of PopTorch and ONNX, which call PyTorch's functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from popsim_torch.custom_ops.registry import CustomCall
from popsim_torch.errors import Error

__all__ = ["built_in", "built_in_names"]

Composite = Callable[..., Any]

# From this version of ai.onnx on, an operator works along one axis; before, along this and all
# later axes.
_ONE_AXIS = 13


def _fast_gather(data: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    what = "custom_op: FastGatherLastDim"
    if data.dtype not in (torch.float16, torch.float32):
        raise Error(f"{what} takes data of float16 or float32, got {data.dtype}.")
    if index.dtype != torch.int32:
        raise Error(f"{what} takes an index of int32, got {index.dtype}.")
    shapes = tuple(data.shape), tuple(index.shape)
    if not data.dim() or data.dim() != index.dim() or shapes[0][:-1] != shapes[1][:-1]:
        raise Error(
            f"{what} takes an index with the rank of data and the same sizes but the last: data "
            f"have shape {shapes[0]}, and the index has {shapes[1]}."
        )
    return torch.gather(data, -1, index)


def _softmax(
    function: Composite, x: torch.Tensor, axis: int | None = None, *, version: int
) -> torch.Tensor:
    if version >= _ONE_AXIS:
        return function(x, -1 if axis is None else axis)  # type: ignore[no-any-return]
    first = 1 if axis is None else axis % x.dim()
    return function(x.flatten(first), first).reshape(x.shape)  # type: ignore[no-any-return]


def _clip(
    x: torch.Tensor,
    least: torch.Tensor | None = None,
    most: torch.Tensor | None = None,
    *,
    min: float | None = None,
    max: float | None = None,
) -> torch.Tensor:
    return torch.clamp(x, least if min is None else min, most if max is None else max)  # type: ignore[arg-type]


def _gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return F.gelu(x, approximate=approximate)


def _gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> torch.Tensor:
    product = alpha * ((a.T if transA else a) @ (b.T if transB else b))
    return product if c is None else product + beta * c


def _hard_sigmoid(x: torch.Tensor, alpha: float = 0.2, beta: float = 0.5) -> torch.Tensor:
    return torch.clamp(alpha * x + beta, 0.0, 1.0)


def _selu(
    x: torch.Tensor, alpha: float = 1.6732632423543772, gamma: float = 1.0507009873554805
) -> torch.Tensor:
    return gamma * F.elu(x, alpha)


_SAME_NAME = (
    "Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Erf Exp Floor Log Neg Reciprocal Round "
    "Sigmoid Sign Sin Sinh Sqrt Tan Tanh"
)
_ONNX: dict[str, Composite] = {
    **{name: getattr(torch, name.lower()) for name in _SAME_NAME.split()},
    "Add": torch.add,
    "Clip": _clip,
    "Div": torch.div,
    "Elu": lambda x, alpha=1.0: F.elu(x, alpha),
    "Equal": torch.eq,
    "Gemm": _gemm,
    "Greater": torch.gt,
    "HardSigmoid": _hard_sigmoid,
    "Identity": torch.clone,
    "LeakyRelu": lambda x, alpha=0.01: F.leaky_relu(x, alpha),
    "Less": torch.lt,
    "MatMul": torch.matmul,
    "Mul": torch.mul,
    "Pow": torch.pow,
    "Relu": torch.relu,
    "Selu": _selu,
    "Softplus": F.softplus,
    "Softsign": F.softsign,
    "Sub": torch.sub,
    "Sum": lambda *tensors: functools.reduce(torch.add, tensors),
    "ThresholdedRelu": lambda x, alpha=1.0: torch.where(x > alpha, x, 0.0),
    "Where": torch.where,
}
_WITH_VERSION: dict[str, Composite] = {
    "LogSoftmax": functools.partial(_softmax, torch.log_softmax),
    "Softmax": functools.partial(_softmax, torch.softmax),
}
_GRAPHCORE: dict[str, Composite] = {
    "Detach": torch.Tensor.detach,
    "Expm1": torch.expm1,
    "Gelu": _gelu,
    "Log1p": torch.log1p,
    "Scale": lambda x, scale=1.0: scale * x,
    "Square": torch.square,
}
_DOMAINS: Mapping[str, Mapping[str, Composite]] = {
    "ai.onnx": {**_ONNX, **_WITH_VERSION},
    "ai.graphcore": _GRAPHCORE,
    "poptorch.custom_ops": {"FastGatherLastDim": _fast_gather},
}


def built_in(call: CustomCall) -> Callable[[list[torch.Tensor]], list[torch.Tensor]] | None:
    """Return the function that computes an operator of these domains; None for any other.

    Args:
        call: The call. All versions of ``ai.onnx`` are supported, and version 1 of the others.
    """
    composite = _DOMAINS.get(call.domain, {}).get(call.name)
    if composite is None or (call.domain != "ai.onnx" and call.version != 1) or call.version < 1:
        return None
    keywords = dict(call.attributes)
    if call.name in _WITH_VERSION and call.domain == "ai.onnx":
        composite = functools.partial(composite, version=call.version)

    def computed(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        try:
            return [composite(*inputs, **keywords)]
        except TypeError as error:
            raise Error(
                f"custom_op: {call.shown} does not take {len(inputs)} inputs with the attributes "
                f"{sorted(keywords)}: {error}"
            ) from error

    return computed


def built_in_names() -> list[str]:
    """Return the names of the operators of these domains, for messages."""
    return [f"{domain}::{name}" for domain, names in _DOMAINS.items() for name in names]
