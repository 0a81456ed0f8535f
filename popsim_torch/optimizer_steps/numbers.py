"""Python's numbers while a step is traced: they stand for numbers on the device.

A hyper-parameter and a count of steps are numbers for the code of an optimizer. In a program the
first is a variable that ``setOptimizer`` writes, the second a state. So arithmetic on them is
recorded, in float64 as Python's own.

``if`` needs a value. A condition on hyper-parameters is answered with their present values, and
noted: with other values the program has to be traced again. A condition on states is answered both
ways: the step runs once for each answer, and the device chooses between the results.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch

from popsim_torch.errors import Error
from popsim_torch.private_torch.modes import DisableTorchFunction
from popsim_torch.trace.graph.origin import is_user_code, user_line

__all__ = [
    "FUNCTIONS",
    "MOST_PATHS",
    "Choices",
    "Known",
    "StepNumber",
    "StepTruth",
    "evaluate",
    "truth_as_number",
]

Known = Any
"""A number that only hyper-parameters determine: a number, the name of one, or a function of some.

``("name", key)`` is a hyper-parameter; ``(name of the function, *operands)`` is a function.
"""

_RUNS = "popsim_torch.optimizer_steps.runs"  # the module that calls the step

MOST_PATHS = 64
"""The largest number of runs of a step, each with other answers to conditions on states."""


class Choices:
    """The answers to conditions during one run of a step.

    Args:
        answers: The answers to the first conditions on states; later ones are true.
        values: The present values of the hyper-parameters.
        optimizer: The name of the optimizer's class.

    Attributes:
        conditions: The tensors of the conditions on states so far.
        answers: Their answers.
        lines: The lines of the user's code that ask for them.
        noted: The conditions on hyper-parameters so far, with their answers.
    """

    def __init__(
        self, answers: list[bool], values: Mapping[Any, float], optimizer: str = "the optimizer"
    ) -> None:
        self._given = answers
        # (with the condition, so that no other object takes the id of one of its operands)
        self._asked: dict[Any, tuple[Any, bool]] = {}
        self.values = values
        self.optimizer = optimizer
        self.conditions: list[torch.Tensor] = []
        self.answers: list[bool] = []
        self.lines: list[str] = []
        self.noted: list[tuple[Known, object]] = []

    def of_states(self, truth: StepTruth) -> bool:
        """Return the answer to a condition on states; the same one for the same condition."""
        if truth.key in self._asked:
            return self._asked[truth.key][1]
        condition = truth.tensor
        position = len(self.conditions)
        self.conditions.append(condition)
        answer = self._given[position] if position < len(self._given) else True
        self.answers.append(answer)
        self.lines.append(user_line())
        self._asked[truth.key] = truth, answer
        return answer

    def of_values(self, known: Known) -> Any:
        """Return the present value of a known number or condition, and note that it was used."""
        value = evaluate(known, self.values)
        self.noted.append((known, value))
        return value

    def next_answers(self) -> list[bool] | None:
        """Return the answers of the next run; None if all combinations have been tried."""
        answers = list(self.answers)
        while answers and not answers[-1]:
            answers.pop()
        return [*answers[:-1], False] if answers else None


_BINARY: dict[str, tuple[Callable[[Any, Any], Any], Callable[..., torch.Tensor]]] = {
    "add": (operator.add, torch.add),
    "sub": (operator.sub, torch.sub),
    "mul": (operator.mul, torch.mul),
    "div": (operator.truediv, torch.div),
    "floordiv": (operator.floordiv, lambda a, b: torch.floor(torch.div(a, b))),
    "mod": (operator.mod, lambda a, b: a - torch.floor(torch.div(a, b)) * b),
    "pow": (operator.pow, torch.pow),
    "max": (max, torch.maximum),
    "min": (min, torch.minimum),
}
_UNARY: dict[str, tuple[Callable[[Any], Any], Callable[..., torch.Tensor]]] = {
    "neg": (operator.neg, torch.neg),
    "abs": (abs, torch.abs),
    "sqrt": (math.sqrt, torch.sqrt),
    "exp": (math.exp, torch.exp),
    "expm1": (math.expm1, torch.expm1),
    "log": (math.log, torch.log),
    "log1p": (math.log1p, torch.log1p),
    "log2": (math.log2, torch.log2),
    "sin": (math.sin, torch.sin),
    "cos": (math.cos, torch.cos),
    "tanh": (math.tanh, torch.tanh),
    "floor": (math.floor, torch.floor),
    "ceil": (math.ceil, torch.ceil),
    "trunc": (math.trunc, torch.trunc),
    "round": (round, torch.round),
}
FUNCTIONS = tuple(_UNARY)
"""The names of the functions of one number."""

_COMPARISONS: dict[str, tuple[Callable[[Any, Any], Any], Callable[..., torch.Tensor]]] = {
    "lt": (operator.lt, torch.lt),
    "le": (operator.le, torch.le),
    "gt": (operator.gt, torch.gt),
    "ge": (operator.ge, torch.ge),
    "eq": (operator.eq, torch.eq),
    "ne": (operator.ne, torch.ne),
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: pair[0] for name, pair in {**_BINARY, **_COMPARISONS}.items()},
    **{name: pair[0] for name, pair in _UNARY.items()},
}


# Functions of integers that give integers.
_WHOLE = frozenset({"add", "sub", "mul", "floordiv", "mod", "max", "min", "neg", "abs"})
_DIVISIONS = frozenset({"div", "floordiv", "mod"})
_HANDLED = frozenset({"ZeroDivisionError", "ArithmeticError", "Exception"})


def _is_zero(divisor: Any) -> bool:
    """Return whether a divisor is zero, if the code that divides handles the error of Python.

    Other code takes the quotient as the device computes it: it has no way without an error.
    """
    if not isinstance(divisor, (StepNumber, StepTruth)):
        return not divisor
    return _is_handled(sys._getframe(1)) and bool(divisor == 0)


def _is_handled(frame: FrameType | None) -> bool:
    """Return whether a function of the step may catch ``ZeroDivisionError``."""
    while frame is not None and frame.f_globals.get("__name__") != _RUNS:
        code = frame.f_code
        # (the table of handlers is new in Python 3.11)
        handles = getattr(code, "co_exceptiontable", True)
        if handles and not _HANDLED.isdisjoint(code.co_names) and is_user_code(frame):
            return True
        frame = frame.f_back
    return False


def evaluate(known: Known, values: Mapping[Any, float]) -> Any:
    """Return the value of a known number.

    Args:
        known: The number.
        values: The values of the hyper-parameters, by key.
    """
    if not isinstance(known, tuple):
        return known
    name, *operands = known
    if name == "name":
        return values[operands[0]]
    return _FUNCTIONS[name](*(evaluate(one, values) for one in operands))


def _as_tensor(value: Any) -> torch.Tensor:
    with DisableTorchFunction():
        return torch.full((), float(value), dtype=torch.float64)


class StepTruth(torch.SymBool):
    """A condition on numbers; ``bool`` answers it.

    PyTorch's functions take a ``SymBool`` wherever they take a number.

    Args:
        tensor: The condition.
        known: How hyper-parameters alone determine it; None if they do not.
        choices: The answers to conditions.
        name: The comparison, if it is one.
        operands: What it compares.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        known: Known,
        choices: Choices,
        name: str = "",
        operands: Sequence[Any] = (),
    ) -> None:
        super().__init__(self)  # type: ignore[no-untyped-call]
        self.tensor = tensor
        self.known = known
        self.operands = operands
        ids = (
            id(one) if isinstance(one, (StepNumber, StepTruth)) else ("number", one)
            for one in operands
        )
        self.key = (name, *ids) if name else id(self)
        self._choices = choices

    def __bool__(self) -> bool:
        if self.known is not None:
            return bool(self._choices.of_values(self.known))
        return self._choices.of_states(self)

    def __int__(self) -> int:
        return int(bool(self))

    def __float__(self) -> float:
        return float(bool(self))

    def __and__(self, other: Any) -> Any:
        return bool(self) & other

    __rand__ = __and__

    def __or__(self, other: Any) -> Any:
        return bool(self) | other

    __ror__ = __or__

    def __xor__(self, other: Any) -> Any:
        return bool(self) ^ other

    __rxor__ = __xor__

    def as_number(self) -> StepNumber:
        """Return 1 if the condition is true, else 0, as Python's arithmetic takes it."""
        return StepNumber(truth_as_number(self), None, self._choices, whole=True)

    def __repr__(self) -> str:
        return "a condition that changes from step to step"

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __hash__(self) -> int:
        return id(self)


def truth_as_number(truth: Any) -> torch.Tensor:
    """Return a truth value as the device keeps it: 0 or 1, as a float64 tensor."""
    if isinstance(truth, StepTruth):
        with DisableTorchFunction():
            return truth.tensor.to(torch.float64)
    return _as_tensor(truth)


class StepNumber(torch.SymFloat):
    """A number of Python's that is a number on the device.

    PyTorch's functions take a ``SymFloat`` wherever they take a number, and pass it to the mode of
    ``functions`` as it is.

    Args:
        tensor: A float64 tensor of shape ``()``.
        known: How hyper-parameters alone determine it; None if they do not.
        choices: The answers to conditions.
        whole: Whether eager PyTorch has an ``int`` here, and not a ``float``.
    """

    def __init__(
        self, tensor: torch.Tensor, known: Known, choices: Choices, *, whole: bool = False
    ) -> None:
        super().__init__(self)  # type: ignore[no-untyped-call]
        self.tensor = tensor
        self.known = known
        self.choices = choices
        self.whole = whole

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # (for isinstance)
        """The class of the number in eager PyTorch."""
        return int if self.whole else float

    def _with(self, table: Mapping[str, Any], name: str, a: Any, b: Any = None) -> Any:
        operands = [a] if b is None else [a, b]
        for value in operands:
            if not isinstance(value, (StepNumber, int, float, bool, StepTruth)):
                return NotImplemented
        if name in _DIVISIONS and _is_zero(b):
            raise ZeroDivisionError("division by zero")
        with DisableTorchFunction():
            tensors = [
                value.tensor.to(torch.float64)
                if isinstance(value, (StepNumber, StepTruth))
                else _as_tensor(value)
                for value in operands
            ]
            result = table[name][1](*tensors)
        knowns = [getattr(value, "known", value) for value in operands]
        known = None if any(one is None for one in knowns) else (name, *knowns)
        if table is _COMPARISONS:
            return StepTruth(result, known, self.choices, name, operands)
        whole = name in _WHOLE and all(isinstance(one, int) for one in operands)
        return StepNumber(result, known, self.choices, whole=whole)

    def unary(self, name: str) -> Any:
        """Return a function of the number, by its name in ``math`` or ``operator``."""
        return self._with(_UNARY, name, self)

    def binary(self, name: str, a: Any, b: Any) -> Any:
        """Return a function of two numbers, one of them this one, by its name in ``operator``."""
        return self._with(_BINARY, name, a, b)

    def __bool__(self) -> bool:
        return bool(self != 0)

    def _value(self, function: str) -> Any:
        """Return the present value, if hyper-parameters determine it."""
        if self.known is None:
            raise Error(
                f"The step of {self.choices.optimizer} needs the value of a number in {function}"
                f"{user_line(' at ')}, but the number depends on the optimizer's state, which only "
                "a run knows. Compute with tensors or with the functions of Python's math."
            )
        return self.choices.of_values(self.known)

    def __float__(self) -> float:
        return float(self._value("float()"))

    def __int__(self) -> int:
        return int(self._value("int()"))

    def __index__(self) -> int:
        return operator.index(int(self._value("a place that takes an integer")))

    def item(self) -> StepNumber:
        """Return the number itself, as a NumPy number does."""
        return self

    def is_integer(self) -> bool:
        """Return whether the number is whole."""
        return bool(self == self // 1)

    def __hash__(self) -> int:
        # The key of a dict has a value: that of a hyper-parameter, now.
        return hash(self._value("a set, or as the key of a dict"))

    def __repr__(self) -> str:
        return "a number that changes from step to step"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return str(self)


def _binary_method(name: str, *, swapped: bool = False) -> Callable[[Any, Any], Any]:
    def method(self: StepNumber, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            a, b = (other, self) if swapped else (self, other)
            return _TENSOR_FUNCTIONS[name](a, b)
        pair = (other, self) if swapped else (self, other)
        return self.binary(name, *pair)

    return method


def _unary_method(name: str) -> Callable[..., Any]:
    def method(self: StepNumber) -> Any:
        return self.unary(name)

    return method


def _round(self: StepNumber, digits: int | None = None) -> Any:
    if not digits:
        return self.unary("round")
    return (self * 10**digits).unary("round") / 10**digits


def _comparison(name: str) -> Callable[[Any, Any], Any]:
    def method(self: StepNumber, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return _COMPARISONS[name][1](self.tensor, other)
        return self._with(_COMPARISONS, name, self, other)

    return method


def _on_tensors(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Return a function of a number and a tensor: the number has the dtype of the tensor."""

    def call(a: Any, b: Any) -> Any:
        like = a if isinstance(a, torch.Tensor) else b
        dtype = like.dtype if like.is_floating_point() else torch.float32
        a, b = (one.tensor.to(dtype) if isinstance(one, StepNumber) else one for one in (a, b))
        return function(a, b)

    return call


_TENSOR_FUNCTIONS = {name: _on_tensors(pair[1]) for name, pair in _BINARY.items()}
_METHODS: dict[str, Any] = {
    **{f"__{n}__": _binary_method(n) for n in ("add", "sub", "mul", "floordiv", "mod", "pow")},
    **{
        f"__r{n}__": _binary_method(n, swapped=True)
        for n in ("add", "sub", "mul", "floordiv", "mod", "pow")
    },
    "__truediv__": _binary_method("div"),
    "__rtruediv__": _binary_method("div", swapped=True),
    **{f"__{n}__": _comparison(n) for n in _COMPARISONS},
    **{f"__{n}__": _unary_method(n) for n in ("neg", "abs", "floor", "ceil", "trunc")},
    "__round__": _round,
    "__divmod__": lambda self, other: (self // other, self % other),
    "__rdivmod__": lambda self, other: (other // self, other % self),
    "__pos__": lambda self: self,
    # NumPy's functions call these for objects.
    **{n: _unary_method(n) for n in ("sqrt", "exp", "log", "log2", "log1p", "sin", "cos")},
}
for _name, _method in _METHODS.items():
    setattr(StepNumber, _name, _method)


def _of_value(name: str, *, swapped: bool = False) -> Callable[[Any, Any], Any]:
    """Return an operator that needs the value of a number."""
    function: Callable[[Any, Any], Any] = getattr(operator, f"__{name}__")

    def method(self: StepNumber, other: Any) -> Any:
        value = self._value(f"the operator '{name}'")
        value = int(value) if self.whole else value
        return function(other, value) if swapped else function(value, other)

    return method


for _name in ("lshift", "rshift", "and", "or", "xor"):
    setattr(StepNumber, f"__{_name}__", _of_value(_name))
    setattr(StepNumber, f"__r{_name}__", _of_value(_name, swapped=True))


def _of_truth(name: str) -> Callable[..., Any]:
    def method(self: StepTruth, *others: Any) -> Any:
        return getattr(self.as_number(), name)(*others)

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(StepTruth, f"__{_name}__", _of_truth(f"__{_name}__"))
    setattr(StepTruth, f"__r{_name}__", _of_truth(f"__r{_name}__"))
for _name in ("lt", "le", "gt", "ge", "neg", "pos", "abs"):
    setattr(StepTruth, f"__{_name}__", _of_truth(f"__{_name}__"))
