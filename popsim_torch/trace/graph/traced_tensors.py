"""Knows which tensors are traced and the nodes that compute them; can compute without a trace.

The transforms of ``torch.func`` wrap a tensor once for each level; the recorded tensor is the one
inside of all wrappers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx

from popsim_torch.errors import Error
from popsim_torch.private_torch.fake import (
    DataDependentOutputException,
    FakeMaker,
    FakeTensor,
    FakeTensorDeviceMismatchError,
    FakeTensorMode,
    UnsupportedOperatorException,
    is_fake,
)
from popsim_torch.private_torch.functorch import (
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    peek_interpreter_stack,
    temporarily_clear_interpreter_stack,
)
from popsim_torch.private_torch.modes import DisableTorchDispatch, disable_current_modes
from popsim_torch.private_torch.operators import schema_of
from popsim_torch.private_torch.proxies import get_proxy_mode, get_proxy_slot
from popsim_torch.private_torch.trees import tree_leaves
from popsim_torch.trace.graph.device import run_for_shapes
from popsim_torch.trace.graph.origin import user_line
from popsim_torch.trace.graph.shape_rules import RULES
from popsim_torch.wrapper_tensors import is_wrapper

__all__ = [
    "TraceMode",
    "current_graph",
    "find_node",
    "has_memory",
    "host_computation",
    "in_transform",
    "is_batched",
    "is_functorch_wrapped_tensor",
    "is_host_tensor",
    "is_plain",
    "is_traced",
    "layout_of",
    "node_of",
    "of_another_thread",
    "of_another_trace",
    "outside_transforms",
    "tensors_in",
    "traced_tensors",
    "unwrapped",
]

outside_transforms = temporarily_clear_interpreter_stack
"""A scope that hides calls from the transforms of ``torch.func`` around it."""


def in_transform() -> bool:
    """Return whether a transform of ``torch.func`` is active."""
    return peek_interpreter_stack() is not None


def is_traced(value: Any) -> bool:
    """Return whether a value is a tensor of the device."""
    return isinstance(value, torch.Tensor) and is_fake(value)


def is_host_tensor(value: Any) -> bool:
    """Return whether a value is a tensor with data."""
    return isinstance(value, torch.Tensor) and not is_fake(value)


def is_batched(tensor: torch.Tensor) -> bool:
    """Return whether a tensor stands for one of several in ``torch.vmap``."""
    while is_functorch_wrapped_tensor(tensor):
        if is_batchedtensor(tensor):
            return True
        tensor = get_unwrapped(tensor)
    return False


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside of the wrappers of ``torch.func``."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def layout_of(
    tensor: torch.Tensor,
) -> tuple[torch.Size, tuple[int, ...], int, torch.dtype]:
    """Return shape, strides, offset in the memory and dtype of a tensor."""
    return tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype


def is_plain(tensor: FakeTensor, mode: FakeTensorMode) -> bool:
    """Return whether a tensor of a mode has nothing that ``layout_of`` does not tell."""
    return (
        tensor.fake_mode is mode
        and tensor.constant is None
        and tensor.layout is torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a host tensor has elements in its own memory or in its base's."""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and not is_fake(tensor)
        and not is_functorch_wrapped_tensor(tensor)
        and not is_wrapper(tensor)
        and tensor.numel() > 0
    )


def tensors_in(result: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among a call's arguments or results."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for item in result:
            yield from tensors_in(item)


def current_graph() -> torch.fx.Graph | None:
    """Return the graph that is being recorded."""
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer.graph


def find_node(tensor: torch.Tensor) -> torch.fx.Node | None:
    """Return the node that computes a tensor; None for a tensor that is not traced."""
    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(unwrapped(tensor), mode.tracer, None)
    return None if slot is None else slot.proxy.node


def traced_tensors() -> Iterator[tuple[torch.Tensor, torch.fx.Node]]:
    """Yield the tensors of the trace that exist, and the node of each."""
    mode = get_proxy_mode()
    if mode is not None:
        for tensor, slot in mode.tracer.tensor_tracker.items():
            yield tensor, slot.proxy.node


def node_of(tensor: torch.Tensor) -> torch.fx.Node:
    """Return the node that computes a traced tensor."""
    node = find_node(tensor)
    if node is None:
        raise of_another_thread()
    return node


def of_another_thread(source: str = "") -> Error:
    """Return the error for tensors that a thread has computed which is not traced.

    Args:
        source: Where the traced thread uses the result.
    """
    thread = (
        f"forward at {source} uses a result of a thread that"
        if source
        else f"A thread{user_line(' at ')}"
    )
    return Error(
        f"{thread} computes with tensors of a model that another thread compiles; they have no "
        "values meanwhile, and what it computes is not part of the program. In forward, call the "
        "layers one after the other, without threads. Other threads must wait until the first call "
        "of the model, or model.compile(...), has returned."
    )


def of_another_trace(tensor: torch.Tensor) -> Error:
    """Return the error for a tensor that forward has kept from an earlier trace."""
    return Error(
        f"forward{user_line(' at ')} uses a tensor of shape {tuple(tensor.shape)} that was made "
        "during an earlier trace of this or another model, and kept (in an attribute, or by a "
        "cache such as functools.lru_cache); it has no values. Make it in __init__, or make a new "
        "one in each forward, or one of the host in the cache: torch.arange(n, device='cpu')."
    )


def _forgets_device(
    device: torch.device | None = None, layout: torch.layout | None = None, **_settings: Any
) -> bool:
    """Return whether a copy is the sum of a tensor and a zero tangent.

    Under ``vmap``, PyTorch's rule for the sum takes the device of the shapes that it has computed.
    """
    return layout is not None and device == torch.device("meta")


class TraceMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Computes the shapes and dtypes of a trace's tensors.

    Attributes:
        is_over: Whether the trace has ended; code that still has one of its tensors has kept it.
    """

    is_over = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._thread = threading.get_ident()
        self._makers: dict[torch.device, FakeMaker] = {}

    def maker(self, device: torch.device) -> FakeMaker:
        """Return the function that makes the tensors of a device."""
        if device not in self._makers:
            with DisableTorchDispatch():
                self._makers[device] = FakeMaker(self, device)
        return self._makers[device]

    def view(
        self,
        of: FakeTensor,
        layout: tuple[Sequence[int], Sequence[int], int, torch.dtype],
        device: torch.device,
    ) -> tuple[FakeTensor, FakeTensor]:
        """Return two tensors with the memory of another one; nothing is recorded.

        Args:
            of: The other tensor.
            layout: Shape, strides, offset in the memory and dtype.
            device: The device.
        """
        shape, strides, offset, dtype = layout
        maker = self.maker(device)
        with DisableTorchDispatch():
            memory = torch.empty(0, dtype=dtype, device="meta")
            memory.set_(of.untyped_storage(), offset, tuple(shape), tuple(strides))
            return maker(memory, self), maker(memory, self)

    def new(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> tuple[FakeTensor, FakeTensor]:
        """Return two tensors that share new memory; nothing is recorded."""
        maker = self.maker(device)
        with DisableTorchDispatch():
            memory = torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype, device="meta")
            return maker(memory, self), maker(memory, self)

    def _by_own_rule(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> tuple[FakeTensor, ...] | None:
        """Return the results of an operator with a rule of this package; else None."""
        rule = RULES.get(func)
        layouts = None if rule is None or kwargs or self.in_kernel_invocation else rule(*args)
        if layouts is None:
            return None
        device = args[0].fake_device
        return tuple(self.new(*layout, device)[0] for layout in layouts)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute one operator.

        Raises:
            Error: Code reads the value of a tensor that it has kept from the trace, or combines
                it with others, or it is of a thread that is not traced.
        """
        if func is torch.ops.aten._to_copy.default and kwargs and _forgets_device(**kwargs):
            kwargs = {**kwargs, "device": args[0].device}
        try:
            found = self._by_own_rule(func, types, args, kwargs)
            return super().dispatch(func, types, args, kwargs) if found is None else found
        except UnsupportedOperatorException as error:
            operator: Any = error.func
            if operator.namespace != "aten" or schema_of(operator).is_mutable:
                raise
            run_for_shapes(operator)
            return super().dispatch(func, types, args, kwargs)
        except FakeTensorDeviceMismatchError as error:
            kept = [one for one in tree_leaves((args, kwargs)) if is_traced(one)]
            if not self.is_over and threading.get_ident() != self._thread:
                raise of_another_thread() from error
            if not self.is_over or not kept:
                raise
            raise of_another_trace(kept[0]) from error
        except DataDependentOutputException as error:
            if not self.is_over:
                raise
            raise Error(
                "Code reads the value of a tensor that was made in the body of a loop, or in "
                "forward, and kept (in a list, or an attribute). That code ran once, during the "
                "trace, and the tensor never had a value. Return the tensor, or send the values of "
                "every iteration to the host with OutfeedQueue.enqueue."
            ) from error


@contextmanager
def host_computation() -> Iterator[None]:
    """Compute with host tensors in this scope, without trace and transforms."""
    with outside_transforms(), disable_current_modes():
        yield
