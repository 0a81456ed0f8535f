"""Reports calls that eager PyTorch computes, and whose trace fails inside of PyTorch.

Mistakes of a program keep the exceptions of eager PyTorch. What is left are assertions and missing
functions of the code that computes shapes, records calls and transforms them: no program causes
them, and their messages describe code that users do not know.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.fx

from popsim_torch.errors import Error
from popsim_torch.ir import Origin
from popsim_torch.trace.graph.origin import is_user_code, origin_of, user_line
from popsim_torch.trace.graph.traced_tensors import is_traced, of_another_thread

__all__ = ["check_all_recorded", "check_elements_stay", "check_traceable", "check_traced_call"]

_PYTORCH = str(Path(torch.__file__).parent)
_OF_TRACES = tuple(
    f"{_PYTORCH}/{part}"
    for part in (
        "_decomp",
        "_functorch",
        "_higher_order_ops",
        "_library",
        "_meta_registrations",
        "_ops",
        "_prims",
        "_refs",
        "_subclasses",
        "fx",
        "utils/_python_dispatch",
    )
)
# Classes of exceptions with which those parts fail; they report a mistake of a program with others.
_FAILURES = (AssertionError, AttributeError, KeyError, NotImplementedError, ZeroDivisionError)
_WITH_PYTHON = frozenset({"apply_", "map_", "map2_"})
_ASSERTION = "INTERNAL ASSERT FAILED"
# What ``torch.FloatTensor(x)`` tells if the device of x differs, and nothing else.
_OTHER_DEVICE = re.compile(
    r"expected TensorOptions\((.*)device=cpu(.*)\) \(got TensorOptions\(\1device=ipu:0\2\)\)"
)
# How calls begin to fail that compare or save the values of tensors.
_NEEDS_VALUES = re.compile(r"Comparing\s+TensorLikePair|Cannot access data pointer of Tensor")
# What PyTorch asserts of a flag that two threads with tensors of the trace change at the same time.
_OF_TWO_THREADS = re.compile(r"(True|False), (True|False)$|fake_mode\.in_kernel_invocation must be")


def check_elements_stay(name: str, args: tuple[Any, ...]) -> None:
    """Refuse a method that calls a function of Python for each element.

    Args:
        name: The name of a function of torch.
        args: Its positional arguments.

    Raises:
        Error: It is such a method, and the tensor is one of the device.
    """
    if name in _WITH_PYTHON and args and is_traced(args[0]):
        raise Error(
            f"Tensor.{name}{user_line(' at ')} calls a Python function for each element, which "
            "have no values while the model is traced. Compute all elements at once with functions "
            "of torch, or on the host (poptorch.CPU)."
        )


def check_traceable(error: Exception, origin: Origin) -> None:
    """Refuse the call whose trace has failed inside of the parts of PyTorch that trace.

    Args:
        error: The exception that ends a trace.
        origin: The origin of the nodes that were made when it was raised.

    Raises:
        Error: They have failed, and not because of a mistake of the program; or they need values.
    """
    if isinstance(error, AssertionError) and _OF_TWO_THREADS.match(str(error)):
        raise of_another_thread(_line_of(error)) from error
    if not isinstance(error, Error) and (_is_assertion(error) or _is_failure(error)):
        raise _refused(error, origin) from error
    if isinstance(error, RuntimeError) and _NEEDS_VALUES.match(str(error)):
        raise Error(
            f"forward{_line_of(error, ' at ')} calls code of PyTorch that compares or saves the "
            "values of tensors of the device, which do not exist while the model is traced. Do it "
            "after the call of the model. Instead of torch.jit.trace, call the module itself: it "
            "is compiled in any case; or pass check_trace=False."
        ) from error
    entry = _innermost(error)
    if isinstance(error, TypeError) and entry is not None and _OTHER_DEVICE.search(str(error)):
        raise Error(
            f"forward at {entry.tb_frame.f_code.co_filename}:{entry.tb_lineno} makes a tensor of a "
            "tensor by a class of tensors, such as torch.FloatTensor(x). These are classes of the "
            "host, and take no tensor of the device. Write x.float(), x.long() or x.clone()."
        ) from error


def check_traced_call(error: Exception, name: str, origin: Origin) -> None:
    """Refuse a call that has failed in a trace, and does not fail outside of it.

    Args:
        error: The exception of the call.
        name: The name of the function.
        origin: The origin of the nodes that the call makes.

    Raises:
        Error: Its class says that PyTorch has failed.
    """
    frame = _innermost_frame(error)
    if isinstance(error, _FAILURES) and not (frame and is_user_code(frame)):
        raise _refused(error, origin, makes_sparse=name.startswith("sparse_")) from error


def check_all_recorded(module: torch.fx.GraphModule) -> None:
    """Refuse tensors of the trace that were computed without being recorded.

    Args:
        module: The recorded graph. Such tensors are constants in it.

    Raises:
        Error: Another thread has computed a tensor, and forward uses it.
    """
    for node in module.graph.nodes:
        if node.op == "get_attr" and is_traced(getattr(module, str(node.target))):
            used = [origin_of(user).source for user in node.users]
            raise of_another_thread(next(filter(None, used), ""))


def _is_assertion(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and _ASSERTION in str(error)


def _is_failure(error: Exception) -> bool:
    frame = _innermost_frame(error)
    if frame is None or not isinstance(error, _FAILURES):
        return False
    code = frame.f_code  # (`torch.ops.unknown.name` is a mistake of the program)
    return code.co_filename.startswith(_OF_TRACES) and code.co_name != "__getattr__"


def _innermost(error: Exception) -> TracebackType | None:
    entry = error.__traceback__
    while entry is not None and entry.tb_next is not None:
        entry = entry.tb_next
    return entry


def _line_of(error: Exception, before: str = "") -> str:
    """Return ``file:line`` of the innermost user code that an exception has passed."""
    entry, line = error.__traceback__, ""
    while entry is not None:
        if is_user_code(entry.tb_frame):
            line = f"{before}{entry.tb_frame.f_code.co_filename}:{entry.tb_lineno}"
        entry = entry.tb_next
    return line


def _innermost_frame(error: Exception) -> FrameType | None:
    entry = _innermost(error)
    return None if entry is None else entry.tb_frame


def _refused(error: Exception, origin: Origin, *, makes_sparse: bool = False) -> Error:
    call = "the gradient of the call" if origin.backward else "the call"
    layer = f" in the layer '{origin.scope.replace('/', '.')}'" if origin.scope else ""
    text = re.split(r", please report a bug|\. This could be because", str(error))[0]
    dense = "The device supports dense tensors only. " if makes_sparse else ""
    return Error(
        f"PyTorch cannot trace {call}{f' at {origin.source}' if origin.source else ''}{layer}: "
        f"{': '.join([type(error).__name__, *text.splitlines()[:1]])}\n"
        f"{dense}Compute it with other functions, or on the host (poptorch.CPU)."
    )
