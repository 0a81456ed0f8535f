"""Replacements in a trace for functions that cannot be traced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from popsim_torch.errors import Error
from popsim_torch.trace.causal_masks import masked_causal_call
from popsim_torch.trace.complex_calls import complex_call
from popsim_torch.trace.ctc import ctc_call
from popsim_torch.trace.cumprod import cumprod_call
from popsim_torch.trace.graph.device import DEVICE
from popsim_torch.trace.graph.origin import user_line
from popsim_torch.trace.grouped_products import grouped_call
from popsim_torch.trace.loss_calls import loss_call
from popsim_torch.trace.mutating_operators import functional_call
from popsim_torch.trace.python_bools import power_of_bools, shift_of_bools
from popsim_torch.trace.static_shapes import static_call
from popsim_torch.trace.untraceable_calls import check_elements_stay

_NATIVE_BATCH_NORMS = ("native_batch_norm", "_native_batch_norm_legit")
_NORMS = frozenset({torch.linalg.norm, torch.linalg.vector_norm, torch.norm, torch.Tensor.norm})


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Compute ``F.one_hot`` as on the host, where a class out of range is an error.

    On other devices it compares with every class instead, and leaves the rows of such classes zero.
    """
    if num_classes == -1:
        num_classes = _number_of_classes(tensor)
    zeros = torch.zeros((*tensor.shape, num_classes), dtype=torch.int64, device=DEVICE)
    return zeros.scatter(-1, tensor.unsqueeze(-1), 1)


def _number_of_classes(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.max()) + 1
    except Error:
        raise Error(
            f"F.one_hot{user_line(' at ')}: without num_classes, the largest class decides the "
            f"shape of the result, and the classes, a tensor on the device of shape "
            f"{tuple(tensor.shape)}, have no values while the model is traced. Pass the number of "
            "classes: F.one_hot(labels, num_classes=10)."
        ) from None


def _bincount(
    input: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0
) -> torch.Tensor:
    """Compute ``torch.bincount`` with the given number of bins.

    Larger numbers are not counted. A negative number is an error.
    """
    if minlength < 0:
        raise RuntimeError("minlength should be >= 0")
    if input.dim() != 1:
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    if weights is not None and weights.shape != input.shape:
        raise RuntimeError("weights should be 1-d and have the same length as input")
    if input.is_floating_point() or input.dtype == torch.bool:
        name = torch.empty(0, dtype=input.dtype, device="cpu").type()  # torch.FloatTensor
        name = name.removeprefix("torch.").removesuffix("Tensor")
        raise NotImplementedError(f"\"bincount_cpu\" not implemented for '{name}'")
    input = input.long()  # a small type may not have the number of bins
    bins = torch.where(input >= minlength, minlength, input)
    if weights is None:
        weights = torch.ones(input.shape, dtype=torch.int64, device=DEVICE)
    elif weights.dtype != torch.float32:
        weights = weights.float()  # eager adds up in float64, which is float32 here
    counts = torch.zeros(minlength + 1, dtype=weights.dtype, device=DEVICE)
    return counts.scatter_add(0, bins, weights)[:minlength]


def _isfinite(input: torch.Tensor) -> torch.Tensor:
    """Compute ``torch.isfinite`` without comparing a NaN, which floating-point checks report."""
    return torch.isnan(input).logical_or(torch.isinf(input)).logical_not()


def _histc(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute ``torch.histc`` of integers: the host cannot, but devices can."""
    return torch.histc(input.float(), *args, **kwargs).to(input.dtype)


def _random_between(tensor: torch.Tensor, low: int, high: int | None, **settings: Any) -> Any:
    """Compute ``tensor.random_(low, high)``.

    Its overload is called ``from``, which torch.fx cannot write as Python code.
    """
    if high is None:
        high = _largest(tensor.dtype) + (tensor.dtype != torch.int64)
    settings = {"dtype": tensor.dtype, "device": DEVICE, **settings}
    numbers = torch.randint(low, high, tensor.shape, **settings)
    return tensor.copy_(numbers)


def _largest(dtype: torch.dtype) -> int:
    """Return the largest integer up to which a dtype represents every integer."""
    if dtype == torch.bool:
        return 1
    if dtype.is_floating_point:
        return int(2 / torch.finfo(dtype).eps)
    return torch.iinfo(dtype).max


def _polygamma_(tensor: torch.Tensor, n: int) -> torch.Tensor:
    """Compute ``tensor.polygamma_(n)``."""
    return tensor.copy_(torch.polygamma(n, tensor))


def _batch_norm_of_running(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """Compute ``torch.native_batch_norm`` in eval mode, which has no statistics of the batch."""
    out = F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    return out, input.new_empty(0), input.new_empty(0)


def _pdist_of_nothing(input: torch.Tensor, p: float = 2.0) -> torch.Tensor:
    """Compute ``torch.pdist`` of no rows, whose gradient ends the process in PyTorch."""
    torch.pdist(input.new_zeros(1, input.shape[1]), p)  # refuses what it refuses
    return input.flatten()


def _norms_of_nothing(
    x: torch.Tensor,
    _order: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
    **_others: Any,  # the order by name, and ``out``
) -> Callable[[], torch.Tensor] | None:
    """Return a replacement of no norms, each of some elements, which PyTorch's rule refuses."""
    axes = (dim,) if isinstance(dim, int) else dim
    if not axes or not all(x.shape[axis] for axis in axes):
        return None
    return lambda: x.abs().sum(axes, keepdim, dtype=dtype)


def traceable_call(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """Return a replacement for a function, or None to call the function.

    Args:
        func: A function of torch.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        Error: The device cannot run the function.
    """
    if func is F.one_hot:
        num_classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
        if num_classes == -1 or num_classes > 0:
            return functools.partial(_one_hot, *args, **kwargs)
    if func is torch.ctc_loss:
        return ctc_call(args, kwargs)
    if func in (torch.cumprod, torch.Tensor.cumprod):
        return cumprod_call(args, kwargs)
    if func in (torch.bincount, torch.Tensor.bincount):
        # Without a number of bins the result depends on values, which may be known.
        num_bins = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
        return functools.partial(_bincount, *args, **kwargs) if num_bins else None
    if func in (torch.isfinite, torch.Tensor.isfinite):
        return functools.partial(_isfinite, *args, **kwargs)
    if func in (torch.histc, torch.Tensor.histc) and not args[0].is_floating_point():
        return functools.partial(_histc, *args, **kwargs)
    if func is torch.Tensor.random_:
        settings = dict(kwargs)
        bounds = (*args[1:], *(settings.pop(key) for key in ("from", "to") if key in settings))
        if len(bounds) == 2:
            return functools.partial(_random_between, args[0], *bounds, **settings)
    if getattr(func, "__name__", "") in _NATIVE_BATCH_NORMS and len(args) == 8 and not args[5]:
        return functools.partial(_batch_norm_of_running, *args)
    if func is torch.pdist and args and args[0].dim() == 2 and args[0].shape[0] == 0:
        return functools.partial(_pdist_of_nothing, *args, **kwargs)
    if func in _NORMS and args and args[0].numel() == 0 and kwargs.get("out") is None:
        return _norms_of_nothing(*args, **kwargs)
    if func is torch.Tensor.polygamma_:  # PyTorch has no rule that removes its change in place
        return functools.partial(_polygamma_, *args, **kwargs)
    if func is torch.Tensor.share_memory_:  # one process runs the program
        return lambda: args[0]
    name = getattr(func, "__name__", "")
    check_elements_stay(name, args)
    return (
        grouped_call(name, args, kwargs)
        or power_of_bools(name, args, kwargs)
        or shift_of_bools(func, name, args, kwargs)
        or masked_causal_call(func, name, args, kwargs)
        or loss_call(func, name, args, kwargs)
        or complex_call(func, args, kwargs)
        or static_call(func, args, kwargs)
        or functional_call(func, args, kwargs)
    )
