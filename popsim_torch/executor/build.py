"""The boundary: one call into C++ with the ir."""

from __future__ import annotations

from typing import Any

from popsim_torch import _native
from popsim_torch.dtypes import dtype_name
from popsim_torch.environment import flag
from popsim_torch.errors import InternalError
from popsim_torch.ir import (
    Graph,
    LoopCounts,
    Program,
    TensorArgument,
    TensorListArgument,
)


def _argument(value: Any) -> Any:
    if isinstance(value, TensorArgument):
        return _native.TensorArgument(value.input)
    if isinstance(value, TensorListArgument):
        return _native.TensorListArgument(list(value.inputs))
    return value


def _attribute(key: str, value: Any) -> Any:
    if key == "arguments":
        return _native.Arguments([_argument(item) for item in value])
    if isinstance(value, list) and any(isinstance(item, bool) for item in value):
        raise TypeError(f"{key} is a list of truth values, which C++ would take for numbers")
    return _text(value) if isinstance(value, str) else value


def _text(text: str) -> str:
    """Return a name or title as UTF-8 can express it, which lone surrogates are not part of."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def to_native(graph: Graph) -> _native.Graph:
    """Return the C++ form of a graph, tensor ids unchanged."""
    native = _native.Graph()
    for tensor in graph.tensors:
        native.add_tensor(
            _text(tensor.name),
            getattr(_native.TensorKind, tensor.kind.name),
            dtype_name(tensor.dtype),
            list(tensor.shape),
            list(tensor.strides),
            tensor.base,
            tensor.offset,
        )
    guarded = {"guarded": True} if flag("POPSIM_CHECK_CUSTOM_OPS") else {}
    for op in graph.ops:
        attributes = op.attributes | (guarded if op.kind == "custom" else {})
        try:
            native.add_op(
                op.kind,
                _text(op.name),
                op.inputs,
                op.outputs,
                {key: _attribute(key, value) for key, value in attributes.items()},
                getattr(_native.Phase, op.phase.name),
                op.stage,
                op.origin.source,
                list(map(to_native, op.bodies)),
            )
        except TypeError as error:
            raise InternalError(
                f"build: C++ has no {op.kind} '{op.name}' with such values: {op.attributes}, "
                f"inputs {op.inputs}, outputs {op.outputs}, stage {op.stage}"
            ) from error
    return native


def executable_text(executable: _native.Executable) -> str:
    """Return what an executable runs, in which order, and how much memory it takes."""
    plan = executable.plan
    return (
        f"{executable.actions()}\n\n{executable.program()}\n"
        f"arena: {plan.arena_bytes} bytes, live at most {plan.peak_live_bytes}\n"
        f"persistent: {plan.persistent_bytes} bytes\n"
    )


def build_executable(
    program: Program,
    loop: LoopCounts,
    *,
    training: bool,
    schedule: str,
    floating_point_checks: bool = False,
    fed: bool = False,
) -> _native.Executable:
    """Compile a program: kernels prepared, memory planned and allocated, constants in place.

    Args:
        program: The lowered model.
        loop: How often a call runs it.
        training: Whether it has a backward pass and updates.
        schedule: One of ``ir.SCHEDULES``.
        floating_point_checks: Runs end at the first op whose arithmetic fails.
        fed: Inputs come from queues.

    Raises:
        Error: An op cannot be prepared, or what is computed at once fails.
        InternalError: The program breaks a rule; our own bug.
    """
    returns = [
        _native.ReturnSpec(list(r.shape), dtype_name(r.dtype), r.keep) for r in program.returns
    ]
    config = _native.RunConfig(
        loop.device_iterations,
        loop.gradient_accumulation,
        training,
        schedule,
        floating_point_checks,
        fed,
    )
    with _native.translated_errors():
        executable = _native.Executable(to_native(program.graph), config, returns)
        for tensor in program.graph.tensors:
            if tensor.value is not None:
                executable.write(tensor.id, tensor.value)
        executable.load()
    return executable
