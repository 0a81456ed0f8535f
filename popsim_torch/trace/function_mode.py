"""Observes the torch functions that user code calls during the trace.

The mode makes new tensors on the device, turns tensors from outside into constants, refuses calls
that cannot be traced (reads of values, moves off the device), records losses, and asks for a name
of the gradient of every differentiable result.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from popsim_torch.errors import Error
from popsim_torch.private_torch.devices import device_constructors
from popsim_torch.private_torch.fake import FakeTensor, FakeTensorMode
from popsim_torch.private_torch.modes import (
    SET_GRAD_ENABLED,
    DisableTorchFunction,
)
from popsim_torch.private_torch.operators import (
    HigherOrderOperator,
    cond_op,
    custom_function_call,
)
from popsim_torch.private_torch.tensors import asks_for_gradient
from popsim_torch.private_torch.trees import tree_leaves, tree_map
from popsim_torch.trace.autocast import as_autocast
from popsim_torch.trace.back_end_choices import replacements
from popsim_torch.trace.books.device_loop import DeviceLoopTrace
from popsim_torch.trace.books.known_values import TO_PYTHON, reads_device
from popsim_torch.trace.call_arguments import (
    copied,
    draws_random_numbers,
    on_device,
    with_device,
    without_dropout,
)
from popsim_torch.trace.checked_losses import TRACEABLE
from popsim_torch.trace.control.flow import ControlFlow
from popsim_torch.trace.control.higher_order import higher_order_call
from popsim_torch.trace.cross_entropy import cross_entropy_call
from popsim_torch.trace.dynamic_slices import slicing_call
from popsim_torch.trace.eager_errors import eager_error
from popsim_torch.trace.graph.device import DEVICE
from popsim_torch.trace.graph.device_types import as_device_types, as_seen, note_requires_grad
from popsim_torch.trace.graph.origin import current_origin, user_line
from popsim_torch.trace.graph.traced_tensors import (
    in_transform,
    is_host_tensor,
    is_traced,
    of_another_trace,
    tensors_in,
)
from popsim_torch.trace.host_changes import HostChanges, call_on_host
from popsim_torch.trace.host_data import HostData, makes_tensor_of_data, tensor_of_data
from popsim_torch.trace.host_reads import warn_of_host_read
from popsim_torch.trace.in_place import changed_tensor, check_memory, is_in_place, masked_write
from popsim_torch.trace.label_checks import check_labels
from popsim_torch.trace.list_indices import with_tensor_indices
from popsim_torch.trace.losses import LOSS_FUNCTIONS
from popsim_torch.trace.mask_checks import check_masks
from popsim_torch.trace.mixed_types import check_types
from popsim_torch.trace.moves import check_memory_read, is_cpu, leaves_device, refused_move
from popsim_torch.trace.new_data import Ends, assign_data
from popsim_torch.trace.packed import packing_call
from popsim_torch.trace.python_bools import without_bools
from popsim_torch.trace.recurrent import RECURRENT_FUNCTIONS, recurrent_call
from popsim_torch.trace.refused_kinds import check_kinds
from popsim_torch.trace.reshaped_views import ReshapedViews
from popsim_torch.trace.result_types import check_result_type
from popsim_torch.trace.selected import Selected, is_usual, selecting_call
from popsim_torch.trace.selected_calls import selected_call
from popsim_torch.trace.slice_checks import check_slice
from popsim_torch.trace.strided_reads import StridedReads
from popsim_torch.trace.traceable import traceable_call
from popsim_torch.trace.untraceable_calls import check_traced_call

_RANDOM_CONSTRUCTORS = frozenset({"rand", "randn", "randint", "randperm"})
_PRINTS = frozenset({"__repr__", "__str__", "__format__"})
# Functions that read a tensor's values without an operator of PyTorch.
_READS = _PRINTS | TO_PYTHON
_GRADIENTS = frozenset({torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward})
_OVERRIDE_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


class FunctionListener(HostData, Ends, Protocol):
    """The part of the tracer that gets the observations of the mode."""

    def known(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the traced tensor for a parameter or buffer of the model, else ``tensor``."""

    def seen_outside(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the user's tensor for its replacement in the body of a loop or branch."""

    @property
    def control_flow(self) -> ControlFlow:
        """Return the recorder of loops and branches."""

    @property
    def loop(self) -> DeviceLoopTrace | None:
        """The device loop, if its body is traced."""

    @property
    def host_changes(self) -> HostChanges:
        """Return the object that reports changes of host tensors."""

    def note_refusal(self, message: str) -> None:
        """Record an error that forward gets for a call."""

    def gradients_wanted(self) -> None:
        """Record that forward asks for gradients itself."""

    def before_call(self, function: Callable[..., Any]) -> None:
        """Record that user code calls ``function``."""

    def after_call(self, result: torch.Tensor) -> None:
        """Record a tensor that a function returned or changed."""

    def hook(
        self, function: Callable[..., Any], tensor: torch.Tensor | None = None
    ) -> Callable[..., Any]:
        """Return a gradient hook of a tensor in which operations of ``popsim_torch`` work."""

    def hook_added(self, tensor: torch.Tensor) -> None:
        """Record that the user has added a hook to a traced tensor."""

    def mark_loss(self, loss: torch.Tensor) -> None:
        """Record the result of a loss function."""

    def mark_differentiated(self, outputs: Sequence[torch.Tensor]) -> None:
        """Record tensors whose gradients forward computes itself."""


@contextlib.contextmanager
def _inner_calls_visible() -> Iterator[None]:
    """Run the bodies of the Python functions of ``torch.nn.functional`` under the mode.

    These functions check whether a mode is active, and then pass the whole call to it. The mode has
    seen that call already; now it needs the calls inside of the body.
    """
    saved = {name: getattr(F, name) for name in _OVERRIDE_CHECKS}
    try:
        for name in _OVERRIDE_CHECKS:
            setattr(F, name, lambda *_: False)
        yield
    finally:
        for name, check in saved.items():
            setattr(F, name, check)


def _is_size(value: Any) -> bool:
    """Return whether a value is a shape; mapping it like other tuples would make a plain tuple."""
    return isinstance(value, torch.Size)


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) and value == DEVICE


class FunctionMode(TorchFunctionMode):
    """The mode that is active while ``forward`` runs.

    Args:
        listener: Gets every call.
        training: Whether dropout is on; without training every dropout is the identity.
        fake_mode: The mode of this trace's tensors.
        back_end: The settings of the back end that are on.
    """

    def __init__(
        self,
        listener: FunctionListener,
        training: bool,
        fake_mode: FakeTensorMode,
        back_end: Iterable[str] = (),
    ) -> None:
        super().__init__()
        self._fake_mode = fake_mode
        self._listener = listener
        self._training = training
        self._replacements = replacements(back_end)
        self._strided_reads = StridedReads()
        self._reshaped_views = ReshapedViews()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Handle one call of a torch function."""
        try:
            return self._handled(func, args, kwargs)
        except Error as error:
            self._listener.note_refusal(str(error))
            raise

    def _handled(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = dict(kwargs or {})
        if func is torch.device:
            return self._known(func(*args, **kwargs))
        if func is SET_GRAD_ENABLED:
            if args[0] and not self._training and not in_transform():
                self._listener.gradients_wanted()
            return func(*args)
        target = args[0] if args else None
        changed = changed_tensor(name, args, kwargs)
        args, kwargs = tree_map(self._known, (args, kwargs), is_leaf=_is_size)
        if (replacement := selected_call(func, name, args, kwargs)) is not None:
            with self:
                result = replacement()
            if func in LOSS_FUNCTIONS and is_usual(result):
                self._listener.mark_loss(result)
            return result
        note_requires_grad(func, name, args, kwargs)
        if isinstance(func, HigherOrderOperator):
            return self._higher_order(func, args, kwargs)
        if name == "__get__" or name == "__set__":
            if name == "__set__" and getattr(func, "__self__", None) is torch.Tensor.data:
                if all(map(is_host_tensor, args)):
                    return self._listener.host_changes.call(func, "set_", args, kwargs)
                return assign_data(self._listener, func, args[0], self._lifted(args[1]))
            if name == "__get__" and is_host_tensor(args[0]):
                result = self._listener.host_changes.call(func, name, args, kwargs)
            else:
                result = func(*args, **kwargs)
            if self._listener.loop is not None and _is_gradient(func):
                _notice_gradient(self._listener.loop, name, args)
            return as_seen(func, args[0], result) if is_traced(args[0]) else result
        if self._stays_on_host(func, args, kwargs):
            if name in _RANDOM_CONSTRUCTORS or draws_random_numbers(func, {}):
                warn_of_host_read(f"torch.{name}")
            return self._listener.host_changes.call(func, name, args, kwargs)
        if name in _READS:
            return self._read(func, name, args, kwargs)
        check_memory_read(name, target, args[0] if args else None)
        if leaves_device(name, args, kwargs):
            return self._to_host(func, name, args, kwargs)
        if name == "register_hook":
            hooks = [*args[1:], *kwargs.values()]
            if not args[0].requires_grad and asks_for_gradient(args[0]):
                return RemovableHandle(OrderedDict())  # (no gradient comes in inference)
            if len(hooks) == 1 and callable(hooks[0]):
                handle = func(args[0], self._listener.hook(hooks[0], args[0]))
                self._listener.hook_added(args[0])
                return handle
        if name == "__reduce_ex__" or (name == "__deepcopy__" and args[0].is_leaf):
            return copied(name, args[0])
        func, args, kwargs = as_device_types(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if makes_tensor_of_data(func, name):
            self._listener.before_call(func)
            with self:
                return tensor_of_data(self._listener, func, name, args, kwargs)
        self._listener.host_changes.notice(name, changed, args, kwargs)
        args = with_tensor_indices(name, args)
        args, kwargs = tree_map(self._lifted, (args, kwargs), is_leaf=_is_size)
        if name == "tensor_split":
            args, kwargs = self._with_numbers(args, kwargs)
        args, kwargs = on_device(func, args, kwargs)
        kwargs = with_device(func, args, kwargs)
        if not self._training:
            args, kwargs, unchanged = without_dropout(name, args, kwargs)
            if unchanged is not None:
                return unchanged
        return self._call(func, name, args, kwargs)

    def _known(self, value: Any) -> Any:
        """Return the traced tensor for a parameter or buffer, and the device for its names."""
        if isinstance(value, FakeTensor) and value.fake_mode is not self._fake_mode:
            raise of_another_trace(value)
        if isinstance(value, torch.Tensor):
            return value if type(value) is Selected else self._listener.known(value)
        if isinstance(value, torch.device) and value.type == "ipu":
            return DEVICE
        if isinstance(value, str) and value in ("ipu", "ipu:0"):
            return DEVICE
        return value

    def _lifted(self, value: Any) -> Any:
        if is_host_tensor(value):
            return self._listener.constant(value)
        return value

    def _stays_on_host(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Return whether a call uses only host tensors: it is computed now, not traced.

        Random numbers are drawn on the device, which draws new ones in each run.
        """
        values = tree_leaves((args, kwargs))
        if any(is_traced(value) or _is_device(value) for value in values):
            return False
        if func in device_constructors():
            return is_cpu(kwargs.get("device"))
        if draws_random_numbers(func, kwargs) and not is_cpu(kwargs.get("device")):
            return False
        return any(isinstance(value, torch.Tensor) for value in values)

    def _read(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a function that converts a tensor's values to Python values."""
        value = self._listener.known_value(args[0])
        if value is not None:
            return call_on_host(func, (value, *args[1:]), kwargs)
        if name in _PRINTS:
            return _placeholder(args[0])
        raise reads_device(args[0], name)

    def _to_host(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a function that takes a tensor of the device to the host."""
        value = self._listener.known_value(args[0])
        if value is not None:
            return call_on_host(func, (value, *args[1:]), kwargs)
        raise refused_move(name, args, kwargs)

    def _with_numbers(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments with numbers instead of tensors, except the first argument."""

        def numbers(value: Any) -> Any:
            if not is_traced(value):
                return value
            return self._read(torch.Tensor.tolist, "tolist", (value,), {})

        others, kwargs = tree_map(numbers, (args[1:], kwargs))
        return (*args[:1], *others), kwargs

    def _call(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._listener.before_call(func)
        if name in RECURRENT_FUNCTIONS:
            args = as_autocast("linear", args)
        check_labels(func, args, kwargs)
        check_memory(func, name, args, kwargs)
        check_result_type(func, name, args, kwargs)
        check_masks(func, name, args, kwargs)
        check_slice(func, args, kwargs)
        self._strided_reads.check(func, name, args, kwargs)
        self._reshaped_views.check(name, args, kwargs)
        check_kinds(func, name, args, kwargs)
        args, kwargs = without_bools(func, name, args, kwargs)
        body: Any = TRACEABLE.get(func, func)
        if getattr(func, "__module__", None) == F.__name__ and hasattr(func, "__code__"):
            with _inner_calls_visible(), self:
                result = body(*args, **kwargs)
        elif func in self._replacements:
            with self:
                result = self._replacements[func](*args, **kwargs)
        elif getattr(func, "__wrapped__", func) in _GRADIENTS:  # (backward() explains itself)
            result = self._differentiate(func, args, kwargs)
        elif (
            replacement := recurrent_call(self._listener.known_value, name, args, kwargs)
            or packing_call(self._listener.known_value, name, args, kwargs)
            or cross_entropy_call(name, args, kwargs)
            or traceable_call(func, args, kwargs)
            or slicing_call(self._listener, name, args)
            or masked_write(self._listener, func, name, args, kwargs)
            or selecting_call(self._listener, name, args, kwargs)
        ) is not None:
            with self:
                result = replacement()
        else:
            result = _called(func, args, kwargs)
        if type(result) is Selected:
            return result
        changed = args and is_in_place(name)
        for tensor in tensors_in(args[0] if changed else result):
            self._listener.after_call(tensor)
        if func in LOSS_FUNCTIONS:
            self._listener.mark_loss(result)
        return self._listener.seen_outside(result) if isinstance(result, torch.Tensor) else result

    def _differentiate(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Compute gradients within forward."""
        loop = self._listener.loop
        if loop is not None and func is torch.Tensor.backward:
            with DisableTorchFunction():
                return loop.backward(*args, **kwargs)
        outputs = list(tensors_in(args[0]))
        if not self._training and not any(output.requires_grad for output in outputs):
            raise Error(
                f"forward{user_line(' at ')} computes gradients (torch.autograd.{func.__name__}) "
                "of tensors that need none: an inference model runs as under torch.no_grad(). "
                "Put the differentiated computation under `with torch.enable_grad():`, or use "
                "torch.func.grad."
            )
        self._listener.mark_differentiated(outputs)
        return func(*args, **kwargs)

    def _higher_order(
        self, operator: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator that takes functions."""
        if operator is custom_function_call:  # a torch.autograd.Function under torch.func
            return operator(*args, **kwargs)
        if operator is cond_op:
            condition, if_true, if_false, operands = args
            known = self._listener.known_value(condition)
            if known is not None:
                with self:
                    return (if_true if known else if_false)(*operands)
        replacement = higher_order_call(self._listener.control_flow, operator, args, kwargs)
        if replacement is None:
            raise Error(
                f"Unsupported ops found in compiled model: [{operator}]{user_line(' at ')} "
                "takes functions, which popsim_torch does not support. Use poptorch.for_loop or "
                "poptorch.cond, torch.cond, or torch.where(condition, a, b)."
            )
        with self:
            return replacement()


def _called(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    check_types(func, args, kwargs)
    try:
        return func(*args, **kwargs)
    except Exception as error:
        eager = eager_error(error, func, args, kwargs)
        if eager is not None:
            raise eager from None
        if not in_transform():
            check_traced_call(error, getattr(func, "__name__", ""), current_origin())
        raise


def _is_gradient(func: Callable[..., Any]) -> bool:
    return getattr(func, "__self__", None) is torch.Tensor.grad


def _notice_gradient(loop: DeviceLoopTrace, name: str, args: tuple[Any, ...]) -> None:
    """Notify a loop of a read ``tensor.grad`` or an assignment ``tensor.grad = ...``."""
    if name == "__get__":
        loop.notice_read(args[0])
    else:
        loop.notice_assigned(args[0])


def _placeholder(tensor: Any) -> str:
    if not isinstance(tensor, torch.Tensor):
        return repr(tensor)
    return (
        f"<tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, on the device: "
        "no value while the model is traced; see poptorch.ipu_print_tensor>"
    )
