"""Converts values to JSON and tensors, and back: only data, so reading runs no code.

JSON's own types represent themselves. Every other value is an object with one key that names its
kind, ``{"tuple": [1, 2]}``. Tensors are stored beside the JSON, which has their numbers.

This module defines the values that can be read: containers, numbers, dtypes, tensors, the package's
own records (``RECORDS``: their fields must have the types that the class declares), its plain
objects (``OBJECTS``) and enums (``ENUMS``). A file can name nothing else.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import sys
import types
import typing
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch

from popsim_torch import enums, ir, optim, stages
from popsim_torch.anchors import AnchorRequest
from popsim_torch.dtypes import dtype_name
from popsim_torch.errors import Error
from popsim_torch.ir import offers
from popsim_torch.optim import loss_scale, plan, planning, rules
from popsim_torch.tensors import selections

__all__ = ["Encoder", "decode"]

RECORDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(ir.Anchor, ir.LoopCounts, ir.Op, ir.Origin, ir.Program, ir.Tensor),
        *(ir.RunSettings, offers.Offers),
        *(ir.TensorArgument, ir.TensorListArgument, AnchorRequest, rules.Rule),
        *(planning.AttributeRecord, planning.GroupSettings, planning.HyperParameter),
        *(planning.OptimizerSettings, plan.Accumulation, plan.OptimizerPlan, plan.ParameterUpdate),
        *(loss_scale.LossScaleRule, plan.Scalar, plan.State, plan.Term),
        *(selections.Glob, selections.Named, selections.Regex, selections.AnyOf, selections.AllOf),
        *(selections.Not, selections.OfKind, selections.OfModule, selections.OfDtype),
        selections.OfStage,
    )
}
"""Dataclasses of which a file may have instances."""

OBJECTS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(ir.Graph, optim.VariableAttributes, stages.Stage, stages.Phase),
        *(stages.PipelinedExecution, stages.ShardedExecution, stages.SerialPhasedExecution),
        stages.ParallelPhasedExecution,
    )
}
"""Classes whose instances consist of their attributes."""

_GRAPH_FIELDS = {"tensors": list[ir.Tensor], "ops": list[ir.Op], "names": dict[str, int]}

ENUMS: dict[str, type[enum.Enum]] = {
    **{name: getattr(enums, name) for name in enums.__all__},
    **{kind.__name__: kind for kind in (ir.Role, ir.TensorKind, plan.GradientInput)},
    "ir.Phase": ir.Phase,
}
_ENUM_NAMES: dict[type[Any], str] = {kind: name for name, kind in ENUMS.items()}

MOST_NUMBERS = 2**20
"""The largest length of a range: a few characters in a file must not use unlimited memory."""


def _range(parts: list[Any]) -> range:
    value = range(*parts)
    if len(value) > MOST_NUMBERS:
        raise ValueError(f"{value} has more than {MOST_NUMBERS} numbers")
    return value


_LISTS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "size": torch.Size,
    "set": set,
    "frozenset": frozenset,
    "slice": lambda parts: slice(*parts),
    "range": _range,
    "complex": lambda parts: complex(*parts),
}
_LIST_NAMES: dict[type[Any], str] = {
    tuple: "tuple",
    torch.Size: "size",
    set: "set",
    frozenset: "frozenset",
}


class Encoder:
    """Converts values to JSON, and collects the tensors among them.

    Args:
        placeholders: Tensors that represent tensors of the reader, by ``id``, with their numbers.

    Attributes:
        tensors: The tensors found so far.
    """

    def __init__(self, placeholders: Mapping[int, int] | None = None) -> None:
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}
        self._placeholders = placeholders or {}

    def __call__(self, value: Any, where: str) -> Any:
        """Return a value as JSON.

        Args:
            value: Any value.
            where: The user's name for the value, for the error.

        Raises:
            Error: The value is not plain data.
        """
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": str(value)}
        if kind is list:
            return [self(item, where) for item in value]
        if kind in _LIST_NAMES:
            items = [self(item, where) for item in value]
            if kind in (set, frozenset):
                items.sort(key=repr)  # the same order in every process
            return {_LIST_NAMES[kind]: items}
        if kind in (dict, OrderedDict):
            items = [[self(key, where), self(item, where)] for key, item in value.items()]
            return {"dict" if kind is dict else "ordered": items}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, where)
        if _is_namedtuple(kind) and _named_tuple_class(*_path(kind)) is kind:
            items = [self(item, where) for item in value]
            module, name, fields = _path(kind)
            return {"namedtuple": [module, name, list(fields), items]}
        if kind.__name__ in RECORDS and RECORDS[kind.__name__] is kind:
            return {kind.__name__: self._fields(value, where)}
        if kind.__name__ in OBJECTS and OBJECTS[kind.__name__] is kind:
            return {kind.__name__: {k: self(v, where) for k, v in vars(value).items()}}
        if kind in _ENUM_NAMES:
            return {"enum": [_ENUM_NAMES[kind], value.name]}
        return self._special(value, where)

    def _fields(self, record: Any, where: str) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        found = {}
        for field in dataclasses.fields(record):
            value = getattr(record, field.name)
            if field.default is dataclasses.MISSING or value is not field.default:
                found[field.name] = self(value, where)
        return found

    def _tensor(self, tensor: torch.Tensor, where: str) -> Any:
        if id(tensor) in self._placeholders:
            return {"placeholder": self._placeholders[id(tensor)]}
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or not tensor.is_cpu:
            raise _not_data(tensor, where)
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        kind = "tensor" if type(tensor) is torch.Tensor else "parameter"
        return {kind: self._numbers[id(tensor)]}

    def _special(self, value: Any, where: str) -> Any:
        if isinstance(value, torch.dtype):
            return {"dtype": dtype_name(value)}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, slice):
            return {"slice": [self(p, where) for p in (value.start, value.stop, value.step)]}
        if isinstance(value, range):
            if len(value) > MOST_NUMBERS:
                raise Error(
                    f"{where} holds {value}, but a file can hold only ranges of at most "
                    f"{MOST_NUMBERS} numbers."
                )
            return {"range": [value.start, value.stop, value.step]}
        if isinstance(value, complex) and type(value) is complex:
            return {"complex": [self(value.real, where), self(value.imag, where)]}
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        if isinstance(value, (numpy.ndarray, numpy.generic)) and value.dtype.kind in "biuf":
            try:
                tensor = torch.from_numpy(numpy.array(value))
            except TypeError:  # a dtype that PyTorch does not have
                raise _not_data(value, where) from None
            kind = "array" if isinstance(value, numpy.ndarray) else "scalar"
            self.tensors.append(tensor)
            return {kind: len(self.tensors) - 1}
        raise _not_data(value, where)


def _not_data(value: Any, where: str) -> Error:
    kind = type(value)
    return Error(
        f"{where} holds a {kind.__module__}.{kind.__qualname__}, but a file can hold only data: "
        "numbers, strings, tensors, and lists, tuples and dicts of these."
    )


def _is_namedtuple(kind: type[Any]) -> bool:
    return issubclass(kind, tuple) and kind.__bases__ == (tuple,) and hasattr(kind, "_fields")


def _path(kind: type[Any]) -> tuple[str, str, tuple[str, ...]]:
    return kind.__module__, kind.__qualname__, tuple(kind._fields)


def _named_tuple_class(module: str, qualified_name: str, fields: Sequence[str]) -> type[Any] | None:
    """Return a class of the running program; it is looked up and never imported."""
    found: Any = sys.modules.get(module)
    for name in qualified_name.split("."):
        # Look only in dictionaries: reading an attribute may run code.
        found = vars(found).get(name) if isinstance(found, (type, types.ModuleType)) else None
    is_class = isinstance(found, type) and _is_namedtuple(found)
    return found if is_class and tuple(found._fields) == tuple(fields) else None


def _named_tuple(content: Any) -> Any:
    module, name, fields, items = content
    kind = _named_tuple_class(module, name, fields)
    if kind is None or len(items) != len(fields):
        raise Error(
            f"The model takes or returns a namedtuple {name} of the module {module}, with the "
            f"fields {', '.join(fields)}, but this program has not imported it. Reading a file "
            "imports nothing: import the class before you load the file."
        )
    return tuple.__new__(kind, items)


def decode(
    data: Any, tensors: Sequence[torch.Tensor], placeholders: Sequence[torch.Tensor] = ()
) -> Any:
    """Return the value that JSON represents.

    Args:
        data: The result of an ``Encoder``, or any other JSON.
        tensors: The tensors of the encoder.
        placeholders: The tensors to put in place of the encoder's placeholders.

    Raises:
        ValueError: The JSON represents no value.
    """
    if isinstance(data, list):
        return [decode(item, tensors, placeholders) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise ValueError(f"an object with the keys {list(data)} stands for no value")
    ((tag, content),) = data.items()
    if tag in _NUMBERED:
        source = placeholders if tag == "placeholder" else tensors
        if type(content) is not int or not 0 <= content < len(source):
            raise ValueError(f"there is no {tag} {content!r}")
    try:
        if tag in _NUMBERED:
            return _NUMBERED[tag](source[content])
        if tag in RECORDS or tag in OBJECTS:
            fields = {k: decode(v, tensors, placeholders) for k, v in content.items()}
            return _record(tag, fields) if tag in RECORDS else _object(tag, fields)
        _check_plain(tag, content)
        value = decode(content, tensors, placeholders)
        return _LISTS[tag](value) if tag in _LISTS else _DECODERS[tag](value)
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise ValueError(f"'{tag}' cannot be that: {error!r}") from error


def _check_plain(tag: str, content: Any) -> None:
    """Check that the items of a container are given as a list.

    Otherwise a range in place of a list would become a list of all its numbers.
    """
    if tag in _LISTS or tag in _PAIRS or tag == "enum":
        lists = [content, *(content if tag in _PAIRS and type(content) is list else ())]
    elif tag == "namedtuple":
        lists = [content, *content[2:]]
    elif type(content) in (str, int, float):
        lists = []
    else:
        raise ValueError(f"'{tag}' cannot be made of a {type(content).__name__}")
    for value in lists:
        if type(value) is not list:
            raise ValueError(f"'{tag}' needs a list, not a {type(value).__name__}")


_PAIRS = ("dict", "ordered")
_NUMBERED: dict[str, Callable[[torch.Tensor], Any]] = {
    "placeholder": lambda tensor: tensor,
    "tensor": lambda tensor: tensor,
    "parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    "array": lambda tensor: tensor.numpy(),
    "scalar": lambda tensor: tensor.numpy()[()],
}


def _dtype(name: str) -> torch.dtype:
    found = vars(torch)[name]
    if not isinstance(found, torch.dtype):
        raise ValueError(f"'{name}' is not a dtype")
    return found


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "dict": dict,
    "ordered": OrderedDict,
    "dtype": _dtype,
    "device": torch.device,
    "bytes": bytes.fromhex,
    "namedtuple": _named_tuple,
    "enum": lambda names: ENUMS[names[0]][names[1]],
}


def _record(tag: str, fields: dict[str, Any]) -> Any:
    checks = _field_checks(tag)
    for name, value in fields.items():
        if name not in checks or not checks[name](value):
            raise ValueError(f"{tag}.{name} cannot be {value!r:.100}")
    return RECORDS[tag](**fields)


def _object(tag: str, attributes: dict[str, Any]) -> Any:
    kind = OBJECTS[tag]
    if kind is ir.Graph:
        for name, hint in _GRAPH_FIELDS.items():
            if not _check_of(hint)(attributes[name]):
                raise ValueError(f"the {name} of the graph are none")
    made: Any = object.__new__(kind)
    vars(made).update(attributes)
    return made


@functools.cache
def _field_checks(tag: str) -> Mapping[str, Callable[[Any], bool]]:
    kind = RECORDS[tag]
    hints = typing.get_type_hints(kind)
    return {field.name: _check_of(hints[field.name]) for field in dataclasses.fields(kind)}


def _check_of(hint: Any) -> Callable[[Any], bool]:
    """Return a function that checks whether a value has an annotated type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in (Any, object):
        return lambda value: True
    if hint in (None, type(None)):
        return lambda value: value is None
    if hint is float:
        return lambda value: type(value) in (float, int)
    if origin in (typing.Union, types.UnionType):
        choices = [_check_of(argument) for argument in arguments]
        return lambda value: any(check(value) for check in choices)
    if origin is typing.Literal:
        return lambda value: value in arguments
    if origin is tuple:
        if arguments[-1:] != (Ellipsis,):
            checks = [_check_of(argument) for argument in arguments]
            return lambda value: (
                type(value) is tuple
                and len(value) == len(checks)
                and all(check(item) for check, item in zip(checks, value, strict=True))
            )
        item_check = _check_of(arguments[0])
        return lambda value: type(value) is tuple and all(map(item_check, value))
    if origin in (list, set, frozenset):
        item_check = _check_of(arguments[0])
        return lambda value: type(value) is origin and all(map(item_check, value))
    if origin in (dict, Mapping):
        key_check, value_check = map(_check_of, arguments)
        return lambda value: (
            type(value) is dict
            and all(map(key_check, value))
            and all(map(value_check, value.values()))
        )
    if isinstance(hint, type) and hint in (bool, int, str):
        return lambda value: type(value) is hint
    return lambda value: isinstance(value, hint)
