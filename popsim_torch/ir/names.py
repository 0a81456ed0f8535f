"""All spellings of tensor names: nobody else forms or parses one.

Names are an interface, since programs anchor tensors by them. What a tensor *is* says its
``Tensor.role``; its name is for people.
"""

from __future__ import annotations

LOSS_SCALE = "lossScaling_FLOAT"
"""The seed of the backward pass."""
LOSS_SCALE_FACTOR = "lossScaleUpdateFactor"
"""What the device multiplies the loss scale by, where it adapts that by itself."""
FINAL_LOSS_SCALE = "finalLossScale"
"""Loss scale times that factor: the seed of the backward pass then."""
GLOBAL_NORM = "GlobalNorm___0"
"""Norm of all gradients together, where they are clipped by it."""

_SEPARATOR = "___"
_GRADIENT = f"Gradient{_SEPARATOR}"
_REBUILT = "__re"
_OLD_PREFIX = "model."


def result(scope: str, op_type: str, output: int) -> str:
    """Return the name of a result of forward: ``<scope>/<OpType>:<output>``."""
    name = f"{op_type}:{output}"
    return f"{scope}/{name}" if scope else name


def numbered(name: str, number: int) -> str:
    """Return the name of the next tensor that would be called ``name``: with ``/1``, ``/2``, ..."""
    return name if number == 0 else f"{name}/{number}"


def inputs(count: int) -> list[str]:
    """Return the names of a model's inputs, in flattened order: input, input/1, ..."""
    return [numbered("input", i) for i in range(count)]


def gradient(name: str) -> str:
    """Return the name of the gradient of the tensor ``name``."""
    return f"{_GRADIENT}{name}"


def updated(name: str) -> str:
    """Return the name of a weight or state as its update left it."""
    return f"UpdatedVar{_SEPARATOR}{name}"


def state(kind: str, parameter: str) -> str:
    """Return the name of an optimizer's state, ``Accl1`` or the like, of a parameter."""
    return f"{kind}{_SEPARATOR}{parameter}"


def velocity_before_update(parameter: str) -> str:
    """Return the name of a combined velocity behind a micro-batch's accumulation."""
    return f"AcclIntoReduce{_SEPARATOR}{parameter}"


def velocity_after_update(parameter: str) -> str:
    """Return the name of a combined velocity behind the update."""
    return f"AcclOutOfAcclUpdate{_SEPARATOR}{parameter}"


def specific_hyper_parameter(kind: str, parameter: str) -> str:
    """Return the name of a hyper-parameter's value for one parameter."""
    return f"{kind}{_SEPARATOR}specific{_SEPARATOR}{parameter}"


def default_hyper_parameter(kind: str, dtype: str) -> str:
    """Return the name of a hyper-parameter's value for the parameters outside of all groups.

    Args:
        kind: Such as ``scaledLearningRate0``.
        dtype: Element type, such as ``float16``.
    """
    return f"{kind}{_SEPARATOR}default{_SEPARATOR}{dtype.upper().replace('FLOAT32', 'FLOAT')}"


def rebuilt(name: str) -> str:
    """Return the name of a forward tensor as the backward pass computes it once more."""
    return f"{name}{_REBUILT}"


def print_title(title: str, name: str, *, is_gradient: bool) -> str:
    """Return what a print is headed with: the user's title, or the name of what is printed."""
    if title:
        return f"{title}_gradient" if is_gradient else title
    return gradient(name) if is_gradient else name


def spellings(name: str) -> tuple[str, str]:
    """Return the names to look for where ``name`` is asked for: older releases added ``model.``.

    ``Gradient___model.fc1.weight`` stands for ``Gradient___fc1.weight`` and the other way round;
    the name as given comes first.
    """
    prefix, separator, tensor = name.rpartition(_SEPARATOR)
    if tensor.startswith(_OLD_PREFIX):
        return name, f"{prefix}{separator}{tensor.removeprefix(_OLD_PREFIX)}"
    return name, f"{prefix}{separator}{_OLD_PREFIX}{tensor}"


def why_missing(name: str) -> str:
    """Return when a tensor of such a name exists, a sentence with a space in front, or nothing."""
    if name.startswith(_GRADIENT):
        return " A gradient exists only of what the loss depends on and what needs one."
    if name.endswith(_REBUILT):
        return " A copy exists only of what recomputation rebuilds in the backward pass."
    return ""
