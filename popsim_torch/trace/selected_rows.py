"""Functions whose results come from one row each: they are computed for all rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from popsim_torch.private_torch.trees import tree_leaves, tree_map_only
from popsim_torch.trace.selected import Selected, is_usual

__all__ = ["by_row"]

# The place of the dimension among the arguments, and its default. No result of such a function
# depends on other rows, if that is not the first dimension.
_DIMENSION: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(
        ("all", "amax", "amin", "any", "argmax", "argmin", "cumprod", "cumsum"), (1, None)
    ),
    **dict.fromkeys(("flip", "gather", "index_select", "logsumexp", "max", "mean"), (1, None)),
    **dict.fromkeys(("median", "min", "narrow", "prod", "select", "std", "sum", "var"), (1, None)),
    **dict.fromkeys(("log_softmax", "softmax", "softmin", "squeeze", "unsqueeze"), (1, None)),
    **dict.fromkeys(("argsort", "glu", "sort"), (1, -1)),
    **dict.fromkeys(("cat", "concat", "flatten", "stack", "unbind"), (1, 0)),
    **dict.fromkeys(("chunk", "split"), (2, 0)),
    **dict.fromkeys(("cosine_similarity", "normalize"), (2, 1)),
    **dict.fromkeys(("linalg_vector_norm", "norm"), (2, None)),
    "topk": (2, -1),
}
_NAMES = ("dim", "start_dim", "dims", "axis")
_ONE_MORE = frozenset({"stack", "unsqueeze"})
# The number of dimensions of images, whose first one is the batch.
_OF_IMAGES = {
    "adaptive_avg_pool2d": 4,
    "avg_pool2d": 4,
    "conv1d": 3,
    "conv2d": 4,
    "conv3d": 5,
    "max_pool2d": 4,
}
_SHAPES = frozenset({"reshape", "view"})
_PRODUCTS = frozenset({"__matmul__", "bmm", "matmul", "mm"})
_NORMS = frozenset({"layer_norm", "rms_norm"})


def by_row(
    first: Selected,
    func: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Callable[[], Any] | None:
    """Return a replacement for a function of each row; None for other calls.

    Args:
        first: Elements at a mask among the arguments.
        func: The function.
        name: Its name.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    for one in tree_leaves((args, kwargs)):
        if type(one) is Selected and not first.is_with(one):
            return None
    if not args or not _is_by_row(name, args, kwargs):
        return None
    return functools.partial(_for_all_rows, first, func, args, kwargs)


def _is_by_row(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether no row of the results depends on other rows of the arguments."""
    x, *others = args
    if name in ("cat", "concat", "stack"):
        joined = all(type(one) is Selected for one in x)
        return joined and _leaves_rows(name, x[0].dim(), args, kwargs)
    if type(x) is not Selected:
        return False
    beside = [one for one in tree_leaves((others, kwargs)) if is_usual(one)]
    if name in _PRODUCTS:
        return _is_product_of_rows(name, x, others)
    if name == "linear":
        return x.dim() > 1 and not _holds_rows((others, kwargs))
    if name == "embedding":  # (max_norm changes the rows that are looked up)
        max_norm = others[2] if len(others) > 2 else kwargs.get("max_norm")
        return max_norm is None and not _holds_rows((others, kwargs))
    if name in _OF_IMAGES:
        return x.dim() == _OF_IMAGES[name] and not _holds_rows((others, kwargs))
    if name in _NORMS:
        shape = others[0] if others else kwargs["normalized_shape"]
        return len(shape) < x.dim() and not _holds_rows((others, kwargs))
    if name == "group_norm":
        return not _holds_rows((others, kwargs))
    if name == "index_select":
        return len(beside) == 1 and _leaves_rows(name, x.dim(), args, kwargs)
    if beside:
        return False
    if name in ("dropout", "one_hot"):
        return True
    if name in _SHAPES:
        sizes = others[0] if len(others) == 1 and isinstance(others[0], Sequence) else others
        inner = list(sizes)[1:]
        return list(sizes)[:1] == [-1] and math.prod(inner) == math.prod(x.full.shape[1:])
    if name == "__getitem__":
        return _is_within_rows(others[0], x.dim())
    return name in _DIMENSION and _leaves_rows(name, x.dim(), args, kwargs)


def _holds_rows(values: Any) -> bool:
    return any(type(one) is Selected for one in tree_leaves(values))


def _is_product_of_rows(name: str, x: Selected, others: Sequence[Any]) -> bool:
    if len(others) != 1:
        return False
    (y,) = others
    if type(y) is Selected:
        return x.dim() > 2 and y.dim() == x.dim()
    return name != "bmm" and is_usual(y) and x.dim() >= 2 and y.dim() <= 2


def _leaves_rows(name: str, dim: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a function works along other dimensions than the first one."""
    place, default = _DIMENSION[name]
    given = [kwargs[key] for key in _NAMES if key in kwargs]
    found: Any = given[0] if given else args[place] if len(args) > place else default
    if name == "flip" and len(args) > 2:
        found = args[1:]
    dims = list(found) if isinstance(found, (list, tuple)) else [found]
    whole = all(type(one) is int for one in dims)
    return bool(dims) and whole and all(one % (dim + (name in _ONE_MORE)) for one in dims)


def _is_within_rows(index: Any, dim: int) -> bool:
    """Return whether an index takes all rows, and the same elements of each."""
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(one is None or one is ... or type(one) in (int, slice) for one in items):
        return False
    if items[0] is ...:
        return sum(one is not None and one is not ... for one in items) < dim
    return items[0] == slice(None) if type(items[0]) is slice else False


def _for_all_rows(
    first: Selected,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    args, kwargs = tree_map_only(Selected, lambda one: one.full, (args, kwargs))
    result = func(*args, **kwargs)
    if isinstance(result, torch.Tensor):
        return _rows(first, result)
    return type(result)([_rows(first, one) for one in result])


def _rows(first: Selected, full: torch.Tensor) -> Selected:
    # (a gradient of zero stays zero, if no row is selected)
    return first.like(first.finite(full) if full.is_floating_point() else full)
