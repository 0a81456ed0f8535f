"""PyTorch's functions while a step is traced: numbers of the device become tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from popsim_torch.errors import Error
from popsim_torch.optimizer_steps.indices import is_position, row, set_row
from popsim_torch.optimizer_steps.mistakes import LeafChanges, called, check_call
from popsim_torch.optimizer_steps.numbers import Choices, StepNumber, StepTruth
from popsim_torch.optimizer_steps.plain_numbers import called_with_tensors, value_if_known
from popsim_torch.trace.graph.origin import user_line

__all__ = ["StepFunctions"]

Numbers = (StepNumber, StepTruth)
_FOREACH = "_foreach_"
# What reads the shape of a tensor.
_SHAPE_METHODS = frozenset({"dim", "size", "numel", "nelement", "ndimension", "stride", "__len__"})
_SHAPE_PROPERTIES = frozenset({"shape", "ndim", "T", "mT", "H"})


class StepFunctions(TorchFunctionMode):
    """Passes tensors to PyTorch's functions in place of numbers of the device.

    Args:
        choices: The answers to conditions.
        leaf_changes: Is told of functions that may change a parameter.

    Attributes:
        reads_shapes: Whether the step has asked for the shape of a tensor.
    """

    def __init__(self, choices: Choices, leaf_changes: LeafChanges) -> None:
        super().__init__()
        self._choices = choices
        self._leaf_changes = leaf_changes
        self.reads_shapes = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of PyTorch."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        check_call(name)
        self._leaf_changes.check(name, args)
        if name in _WIDER:
            return args[0].to(torch.float32)
        args, kwargs = _narrowed(args), {key: _narrowed(one) for key, one in kwargs.items()}
        for key in _SCALARS & kwargs.keys():
            kwargs[key] = self._scalar(kwargs[key])
        if name.removesuffix("_") in _LIMITS:
            args = [args[0], *map(self._scalar, args[1:])]
            kwargs = {key: self._scalar(one) for key, one in kwargs.items()}
        if name in ("__get__", "__set__"):
            return self._property(func, name, args)
        if name in _SHAPE_METHODS:
            self.reads_shapes = True
        if name.startswith(_FOREACH):
            return self._one_by_one(name.removeprefix(_FOREACH), args, kwargs)
        if name in _VALUES:
            return self._value(name, args[0])
        if name == "__setitem__" and _is_masked_fill(*args):
            return _fill_at_mask(*args)
        if name in ("__getitem__", "__setitem__") and is_position(args[1]):
            self.reads_shapes = True
            return (row if name == "__getitem__" else set_row)(*args)
        if name in _MAKERS and _holds_values(name, args, kwargs):
            return _MAKERS[name](list(args), dict(kwargs))
        if not _holds_numbers([*args, *kwargs.values()]):
            return called(func, args, kwargs)
        return self._with_numbers(func, name, list(args), kwargs)

    def _property(self, func: Any, name: str, args: Sequence[Any]) -> Any:
        owner = getattr(func, "__self__", None)
        attribute = getattr(owner, "__name__", "")
        if attribute in _SHAPE_PROPERTIES:
            self.reads_shapes = True
        if (
            attribute == "requires_grad"
            and name == "__get__"
            and self._leaf_changes.watches(args[0])
        ):
            return True
        if attribute == "data":
            # A view, so that changes of it are changes of the tensor.
            return args[0].detach() if name == "__get__" else args[0].copy_(args[1])
        return func(*args)

    def _scalar(self, value: Any) -> Any:
        """Return an argument that has to be a number: a tensor there counts as its value."""
        if isinstance(value, torch.Tensor) and not value.dim() and not value.is_complex():
            return StepNumber(value.to(torch.float64), None, self._choices)
        return value

    def _value(self, name: str, tensor: torch.Tensor) -> Any:
        """Return the value of a tensor with one element as a number of the device."""
        if tensor.dtype == torch.bool:
            truth = StepTruth(tensor.reshape(()), None, self._choices)
            return truth if name in ("item", "tolist") else bool(truth)
        number = StepNumber(tensor.reshape(()).to(torch.float64), None, self._choices)
        if name in ("item", "tolist"):
            return number
        return {"__bool__": bool, "__float__": float, "__int__": int, "__index__": int}[name](
            number
        )

    def _one_by_one(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function of lists of tensors for each tensor."""
        in_place = name.endswith("_")
        bare = name.removesuffix("_")
        function: Any = getattr(torch.Tensor, name, None) or getattr(torch, bare, None)
        if bare == "norm":
            function = torch.linalg.vector_norm
        elif bare in ("maximum", "minimum", "clamp_max", "clamp_min"):
            highest = bare in ("minimum", "clamp_max")
            function = getattr(torch.Tensor, "clamp_max" if highest else "clamp_min")
            if isinstance(args[1], (list, tuple)) and isinstance(args[1][0], torch.Tensor):
                function = torch.minimum if highest else torch.maximum
        elif bare == "copy":
            function = torch.Tensor.copy_

        def at(value: Any, position: int) -> Any:
            return value[position] if isinstance(value, (list, tuple)) else value

        results = []
        for position in range(len(args[0])):
            own = [at(one, position) for one in args]
            options = {key: at(one, position) for key, one in kwargs.items()}
            if bare in ("addcmul", "addcdiv") and len(own) == 4:
                options["value"] = own.pop()
            result = self.__torch_function__(function, (), own, options)
            if in_place and result is not own[0]:
                own[0].copy_(result)
            results.append(result)
        return None if in_place else tuple(results)

    def _with_numbers(self, func: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function some of whose arguments are numbers of the device."""
        like = next((one for one in args if isinstance(one, torch.Tensor)), None)
        dtype = torch.float32
        if like is not None and like.is_floating_point():
            dtype = like.dtype
        in_place = name.endswith("_") and not name.endswith("__")
        bare = name.removesuffix("_") if in_place else name
        if len(args) == _OLD_ORDER.get(bare) and not isinstance(args[1], torch.Tensor):
            kwargs["alpha" if bare in ("add", "sub") else "value"] = args.pop(1)
        if bare in _FUSED:
            # One rounding for product and sum needs the value: part of the program.
            kwargs = {key: value_if_known(one) for key, one in kwargs.items()}
            if not _holds_numbers([*args, *kwargs.values()]):
                return func(*args, **kwargs)
        out = kwargs.pop("out", None)
        if out is not None:
            return _put_out(out, self.__torch_function__(func, (), args, kwargs), name)
        given = args, kwargs
        args = [_as_tensor(one, dtype) for one in args]
        kwargs = {key: _as_tensor(one, dtype) for key, one in kwargs.items()}
        if bare in _SCALED:
            result = _SCALED[bare](*args, **kwargs)
            return args[0].copy_(result) if in_place else result
        try:
            return called_with_tensors(func, args, kwargs)
        except (TypeError, RuntimeError, NotImplementedError) as error:
            # Functions that take numbers of Python's only: hyper-parameters have one now.
            args = [value_if_known(one) for one in given[0]]
            kwargs = {key: value_if_known(one) for key, one in given[1].items()}
            if not _holds_numbers([*args, *kwargs.values()]):
                return called(func, args, kwargs)
            raise Error(
                f"The step of {self._choices.optimizer} calls torch's '{name}'{user_line(' at ')} "
                "with a number that changes from step to step, which the device cannot compute: "
                f"{str(error).splitlines()[0]}"
            ) from error


# Arguments that PyTorch's functions take as numbers of Python's only.
_SCALARS = frozenset({"alpha", "beta", "value"})
_LIMITS = frozenset({"clamp", "clip"})
# Arguments of the deprecated form that begins with the factor: ``p.add_(-lr, p.grad)`` (count).
_OLD_ORDER = {"add": 3, "sub": 3, "addcmul": 4, "addcdiv": 4}
_VALUES = frozenset({"item", "tolist", "__bool__", "__float__", "__int__", "__index__"})


# The device has no tensors of float64, and computes in float32.
_WIDER = frozenset({"double"})


def _narrowed(value: Any) -> Any:
    if value is torch.float64:
        return torch.float32
    return tuple(map(_narrowed, value)) if type(value) is tuple else value


def _holds_numbers(values: Any) -> bool:
    if isinstance(values, Numbers):
        return True
    if isinstance(values, (list, tuple)):
        return any(map(_holds_numbers, values))
    return False


def _is_masked_fill(tensor: torch.Tensor, index: Any, value: Any) -> bool:
    """Return whether a number is written to a tensor at a mask of the same shape."""
    return (
        isinstance(index, torch.Tensor)
        and index.dtype == torch.bool
        and index.shape == tensor.shape
        and isinstance(value, (int, float, StepNumber))
    )


def _fill_at_mask(tensor: torch.Tensor, mask: torch.Tensor, value: Any) -> None:
    # Elementwise, while writing at positions is not.
    tensor.copy_(torch.where(mask, _as_tensor(value, tensor.dtype), tensor))


_FUSED = frozenset({"addmm", "addmv", "addr", "addbmm", "baddbmm"})


def _put_out(out: Any, result: Any, name: str) -> Any:
    """Write a result to the tensor that a call gives for it."""
    if not isinstance(out, torch.Tensor) or out.shape != result.shape:
        raise Error(
            f"The step of the optimizer calls torch's '{name}' with out=, and what is there has "
            f"not the shape {list(result.shape)} of the result{user_line(' at ')}. Leave out= away."
        )
    return out.copy_(result)


def _as_tensor(value: Any, dtype: torch.dtype) -> Any:
    """Return a number of the device as a tensor, as a kernel would read a number of Python's."""
    if isinstance(value, StepNumber):
        return value.tensor.to(dtype)
    if isinstance(value, StepTruth):
        return value.tensor
    if isinstance(value, (list, tuple)):
        return type(value)(_as_tensor(one, dtype) for one in value)
    return value


def _scaled(value: Any, factor: Any) -> Any:
    return value if type(factor) in (bool, int, float) and factor == 1 else value * factor


def _add(a: Any, b: Any, *, alpha: Any = 1) -> Any:
    return torch.add(a, _scaled(b, alpha))


def _sub(a: Any, b: Any, *, alpha: Any = 1) -> Any:
    return torch.sub(a, _scaled(b, alpha))


def _rsub(a: Any, b: Any, *, alpha: Any = 1) -> Any:
    return torch.sub(b, _scaled(a, alpha))


def _addcmul(x: Any, a: Any, b: Any, *, value: Any = 1) -> Any:
    return torch.add(x, torch.mul(_scaled(a, value), b))


def _addcdiv(x: Any, a: Any, b: Any, *, value: Any = 1) -> Any:
    return torch.add(x, torch.div(_scaled(a, value), b))


def _lerp(start: Any, end: Any, weight: Any) -> Any:
    return torch.add(start, torch.mul(weight, torch.sub(end, start)))


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    if min is not None:
        x = torch.maximum(x, min) if isinstance(min, torch.Tensor) else torch.clamp_min(x, min)
    if max is not None:
        x = torch.minimum(x, max) if isinstance(max, torch.Tensor) else torch.clamp_max(x, max)
    return x


def _addmm(x: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    return torch.add(_scaled(x, beta), _scaled(torch.matmul(a, b), alpha))


def _index_add(x: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Any:
    return torch.index_add(x, dim, index, _scaled(source, alpha))


def _fill(x: Any, value: Any) -> Any:
    return torch.zeros_like(x) + value


_SCALED: dict[str, Callable[..., Any]] = {
    "add": _add,
    "__add__": _add,
    "sub": _sub,
    "subtract": _sub,
    "rsub": _rsub,
    "__rsub__": _rsub,
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "lerp": _lerp,
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": lambda x, low: _clamp(x, low),
    "clamp_max": lambda x, high: _clamp(x, None, high),
    **dict.fromkeys(("addmm", "addmv", "addr", "baddbmm", "addbmm"), _addmm),
    "fill": _fill,
    "index_add": _index_add,
}
_SCALED["addr"] = lambda x, a, b, *, beta=1, alpha=1: torch.add(
    _scaled(x, beta), _scaled(torch.outer(a, b), alpha)
)


def _holds_values(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a function makes a tensor of values of the device."""
    values = [*args, *kwargs.values()]
    if _holds_numbers(values):
        return True
    place = _FILLS.get(name)
    if place is not None:
        value = args[place] if len(args) > place else kwargs.get("fill_value")
        return isinstance(value, torch.Tensor)
    return any(isinstance(one, (list, tuple)) and _holds_tensors(one) for one in values)


def _holds_tensors(values: Sequence[Any]) -> bool:
    return any(
        _holds_tensors(one) if isinstance(one, (list, tuple)) else isinstance(one, torch.Tensor)
        for one in values
    )


def _default_dtype(value: Any) -> torch.dtype:
    """Return the dtype of a tensor that is filled with a number."""
    if isinstance(value, torch.Tensor) and not value.is_floating_point():
        return value.dtype if value.is_complex() or value.dtype == torch.bool else torch.int64
    return torch.bool if isinstance(value, (bool, StepTruth)) else torch.get_default_dtype()


def _made_of(value: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, (list, tuple)):
        return torch.stack([_made_of(one, dtype) for one in value])
    if isinstance(value, Numbers):
        return value.tensor.to(dtype or _default_dtype(value)).clone()
    if isinstance(value, torch.Tensor):
        return value.to(dtype or value.dtype).clone()
    return torch.as_tensor(value, dtype=dtype)


def _tensor(args: list[Any], kwargs: dict[str, Any]) -> Any:
    return _made_of(args[0] if args else kwargs["data"], kwargs.get("dtype"))


def _filled(zeros: torch.Tensor, value: Any) -> torch.Tensor:
    """Return a tensor of the device's number in the place of zeros."""
    if isinstance(value, torch.Tensor):
        value = value.to(zeros.dtype)
    filling: torch.Tensor = _as_tensor(value, zeros.dtype)
    return torch.logical_or(zeros, filling) if zeros.dtype == torch.bool else zeros + filling


def _full(args: list[Any], kwargs: dict[str, Any]) -> Any:
    size = args[0] if args else kwargs["size"]
    value = args[1] if len(args) > 1 else kwargs["fill_value"]
    return _filled(torch.zeros(size, dtype=kwargs.get("dtype") or _default_dtype(value)), value)


def _full_like(args: list[Any], kwargs: dict[str, Any]) -> Any:
    like = args[0] if args else kwargs["input"]
    value = args[1] if len(args) > 1 else kwargs["fill_value"]
    others = {k: v for k, v in kwargs.items() if k not in ("fill_value", "input")}
    return _filled(torch.zeros_like(like, **others), value)


def _new_full(args: list[Any], kwargs: dict[str, Any]) -> Any:
    size = args[1] if len(args) > 1 else kwargs["size"]
    value = args[2] if len(args) > 2 else kwargs["fill_value"]
    return _filled(args[0].new_zeros(size, dtype=kwargs.get("dtype")), value)


# The place of the number that fills a new tensor.
_FILLS = {"full": 1, "full_like": 1, "new_full": 2}
_MAKERS: dict[str, Callable[[list[Any], dict[str, Any]], Any]] = {
    "tensor": _tensor,
    "as_tensor": _tensor,
    "scalar_tensor": _tensor,
    "full": _full,
    "full_like": _full_like,
    "new_full": _new_full,
    "new_tensor": lambda args, kwargs: _made_of(args[1], kwargs.get("dtype", args[0].dtype)),
}
