"""Calls that read values of the device in PyTorch, but can be computed with fixed shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from popsim_torch.private_torch.modes import DisableTorchFunction
from popsim_torch.private_torch.tensors import storage_key
from popsim_torch.trace.books.known_values import checked_by_device
from popsim_torch.trace.eager_errors import eager_error, error_on_host
from popsim_torch.trace.graph.device import DEVICE
from popsim_torch.trace.graph.repeated_writes import repeated_dimensions
from popsim_torch.trace.graph.traced_tensors import is_batched

_INDEX_FILLS: dict[Any, bool] = {  # whether the call changes its argument
    torch.index_fill: False,
    torch.Tensor.index_fill: False,
    torch.Tensor.index_fill_: True,
}
_INDEX_PUTS: dict[Any, bool] = {
    torch.index_put: False,
    torch.index_put_: True,
    torch.Tensor.index_put: False,
    torch.Tensor.index_put_: True,
}
_QUANTILES = frozenset(
    {torch.quantile, torch.Tensor.quantile, torch.nanquantile, torch.Tensor.nanquantile}
)
_REPEATS = frozenset({torch.repeat_interleave, torch.Tensor.repeat_interleave})


def static_call(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """Return a replacement for a function, or None to call the function.

    Args:
        func: A function of torch.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    if func in (torch.cov, torch.Tensor.cov):
        weights = [*args[2:], kwargs.get("fweights"), kwargs.get("aweights")]
        if any(weight is not None for weight in weights):
            return functools.partial(_cov, *args, **kwargs)
    if func in (torch.istft, torch.Tensor.istft):
        return functools.partial(_istft, *args, **kwargs)
    if func in _QUANTILES:
        shares = args[1] if len(args) > 1 else kwargs.get("q")
        if isinstance(shares, torch.Tensor):
            return functools.partial(_quantile, func, shares, args, kwargs)
    if func is torch.Tensor.__setitem__:
        x, mask, value = args
        if isinstance(mask, tuple) and len(mask) == 1:
            (mask,) = mask
        return _masked_write(x, mask, value, in_place=True)
    if func in _INDEX_PUTS and len(args) == 3 and len(args[1]) == 1 and not kwargs:
        x, (mask,), value = args
        return _masked_write(x, mask, value, in_place=_INDEX_PUTS[func])
    if func in _REPEATS and isinstance(kwargs.get("output_size"), int):
        return _repeat_call(func, args, kwargs)
    if func is torch.Tensor.is_set_to:
        return functools.partial(_shows_the_same, *args, **kwargs)
    if func in _INDEX_FILLS and len(args) == 4 and _is_trained(args[3]):
        return functools.partial(_index_fill, *args, in_place=_INDEX_FILLS[func])
    return None


def _repeat_call(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """Return a replacement for ``repeat_interleave`` with an ``output_size``, if it has counts."""
    x, repeats = args[0], args[1] if len(args) > 1 else kwargs.get("repeats")
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    if len(args) == 1 and not isinstance(repeats, torch.Tensor):
        repeats = x
    if not isinstance(repeats, torch.Tensor):
        return None
    size = kwargs["output_size"]
    if repeats is x and len(args) == 1:
        return functools.partial(_repeated, None, repeats, 0, size)
    x, dim = (x.flatten(), 0) if dim is None else (x, dim)
    error = error_on_host(func, (x, repeats, dim), {})  # (without the size: the trial has zeros)
    return functools.partial(_repeated, x, repeats, dim, size, error)


def _repeated(
    x: torch.Tensor | None,
    repeats: torch.Tensor,
    dim: int,
    size: int,
    error: Exception | None = None,
) -> torch.Tensor:
    """Compute ``x.repeat_interleave(repeats, dim, output_size=size)``; the indices without ``x``.

    A run checks the counts.
    """
    if error is not None:
        raise error
    if x is not None and repeats.numel() == 1:
        repeats = repeats.reshape(1).expand(x.shape[dim] if x.dim() else 1)
    message = (
        "repeat_interleave: no repeat may be negative, and all of them have to add up to "
        f"output_size, which is {size}."
    )
    ends = repeats.cumsum(0)
    with checked_by_device(message):
        bool((repeats < 0).any() | (repeats.sum() != size))
    rows = torch.arange(size, device=DEVICE, dtype=ends.dtype)
    index = torch.searchsorted(ends, rows, right=True)
    return index if x is None else x.index_select(dim, index)


def _shows_the_same(x: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Compute ``x.is_set_to(tensor)``: traced tensors have no memory that PyTorch can compare."""
    one, other = ((t.shape, t.stride(), t.storage_offset()) for t in (x, tensor))
    return storage_key(x) == storage_key(tensor) and one == other


def _is_trained(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled()


def _masked_write(
    x: torch.Tensor, mask: Any, value: Any, *, in_place: bool
) -> Callable[[], Any] | None:
    """Return a replacement for ``x[mask] = value``, if the value has the same shape for any mask.

    PyTorch's gradient of the value takes the elements at the mask, so their number decides a shape.
    """
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or not _is_trained(value):
        return None
    num_inner = x.dim() - mask.dim()
    if mask.shape != x.shape[: mask.dim()] or value.dim() > num_inner + 1:
        return None
    if value.dim() == num_inner + 1 and value.shape[0] != 1:
        return None
    value = value.reshape(value.shape[1:]) if value.dim() > num_inner else value
    return functools.partial(_where, x, mask, value, in_place=in_place)


def _where(x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor, *, in_place: bool) -> Any:
    """Return ``x`` with a value where the mask of its first dimensions is true."""
    mask = mask.reshape(mask.shape + (1,) * (x.dim() - mask.dim()))
    if in_place and value.numel() == 1 and repeated_dimensions(x):  # (copy_ takes no such tensor)
        return x.masked_fill_(mask, value.reshape(()))
    result = torch.where(mask, value.to(x.dtype), x)
    return x.copy_(result) if in_place else result


def _index_fill(
    x: torch.Tensor, dim: int, index: torch.Tensor, value: torch.Tensor, *, in_place: bool
) -> Any:
    """Compute ``x.index_fill(dim, index, value)`` for a value with a gradient."""
    if value.dim() > 0:
        raise RuntimeError(
            "index_fill_ only supports a 0-dimensional value tensor, but got tensor with "
            f"{value.dim()} dimension(s)."
        )
    mask = torch.zeros(x.shape, dtype=torch.bool, device=DEVICE).index_fill(dim, index, True)
    return _where(x, mask, value, in_place=in_place)


def _istft(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute ``torch.istft``, whose check of the window is made in each run."""
    message = (
        "istft: window overlap add min is zero: the frames leave a gap, where the signal cannot be "
        "computed. Use another window, a smaller hop_length, or center=True."
    )
    try:
        with checked_by_device(message), DisableTorchFunction():
            return torch.istft(*args, **kwargs)
    except RuntimeError as error:
        raise eager_error(error, torch.istft, args, kwargs) or error from None


def _quantile(
    func: Callable[..., torch.Tensor],
    shares: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Compute quantiles at a tensor of shares, which PyTorch checks on the CPU only."""
    message = f"{func.__name__}: all values of q must be in the range [0, 1]."
    with checked_by_device(message):
        bool(((shares >= 0) & (shares <= 1)).all().logical_not())
    with DisableTorchFunction():
        return func(*args, **kwargs)


def _cov(
    input: torch.Tensor,
    correction: int = 1,
    fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``torch.cov`` with weights; a run makes the checks of their values."""
    x = input.reshape(1, -1) if input.dim() < 2 else input
    if fweights is not None:
        _check_weights("fweights", fweights, x.shape[1], floating=False)
    if aweights is not None:
        _check_weights("aweights", aweights, x.shape[1], floating=True)
    given: Any = fweights if aweights is None else aweights
    if fweights is not None and aweights is not None:
        given = fweights * aweights
    total = given.sum()
    if not is_batched(total):
        torch.ops.aten._assert_async.msg(
            total != 0, "cov(): weights sum to zero, can't be normalized"
        )
    norm = total - correction
    if aweights is not None and correction != 0:
        norm = total - correction * (given * aweights).sum() / total
    x = x - ((x * given).sum(1) / total).unsqueeze(1)
    result: torch.Tensor = torch.mm(x, (x * given).t().conj()) / norm.clamp(min=0)
    return result.squeeze()


def _check_weights(name: str, weights: torch.Tensor, count: int, *, floating: bool) -> None:
    """Refuse weights of observations as PyTorch does; a run fails if they are negative."""
    problem = ""
    if weights.dim() > 1:
        problem = f"one or fewer dimensions but got {name} with {weights.dim()} dimensions"
    elif weights.dtype.is_floating_point != floating:
        kind = "floating point" if floating else "integral"
        problem = f"{kind} dtype but got {name} with {weights.dtype} dtype"
    elif weights.numel() != count:
        problem = (
            "the same numel as there are observations in the input but got "
            f"{weights.numel()} != {count}"
        )
    if problem:
        raise RuntimeError(f"cov(): expected {name} to have {problem}")
    if count and not is_batched(weights):
        torch.ops.aten._assert_async.msg(
            weights.detach().amin() >= 0, f"cov(): {name} cannot be negative"
        )
