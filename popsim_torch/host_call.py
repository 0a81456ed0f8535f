"""Host calls in the middle of a program: ``CPU``, and the record of each call in a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

from popsim_torch.dtypes import INPUTS, dtype_name
from popsim_torch.errors import Error
from popsim_torch.ops import op_listener
from popsim_torch.private_torch.trees import TreeSpec, tree_flatten, tree_unflatten
from popsim_torch.stages import block_listener

__all__ = ["CPU", "CallArguments", "HostCall", "HostListener", "TensorType"]

_running: ContextVar[str] = ContextVar("popsim_torch_running_cpu_op", default="")
"""The ID of the CPU op whose code is running; empty outside of CPU ops."""


class HostListener(Protocol):
    """The methods of the tracer that handle host calls."""

    def on_host(self) -> AbstractContextManager[None]:
        """Run code on the host's tensors, without recording it."""

    def host_call(self, cpu: CPU, arguments: CallArguments) -> torch.Tensor | list[torch.Tensor]:
        """Return the traced results of a host call."""


class CPU:
    """Calls a module or function on the host, in the middle of the program.

    While a model is compiled, the callable is called once with zeros: its results must always have
    the shapes and dtypes that it returns then. Later each run calls it for every micro-batch, on
    the thread that called the model. Its arguments are ordinary tensors, which it may keep and
    change. Outside of a model that is being compiled, calling this object calls the callable.

    Parameters of a module are not trained: their ``requires_grad`` is set to False. Their values
    are read from the host when the module is called. In training the call has a gradient: the
    backward pass calls the callable again, and autograd differentiates it.

    If the model does not use the results of a call, the call is left out of the program, with a
    warning.

    Args:
        layer_to_call: A module or another callable. It takes tensors, alone or in lists, tuples and
            dicts, and Python values, which are always those of the call in ``forward``. It returns
            a tensor, or a list or tuple of tensors; the call then gives a tensor or a list. The
            returned tensors are copied.
        ID: The name of the operation, unique in the model.

    Raises:
        Error: ``layer_to_call`` cannot be called, or ``ID`` is not a string.
    """

    def __init__(self, layer_to_call: Callable[..., Any], ID: str) -> None:
        if not callable(layer_to_call):
            raise Error(
                f"poptorch.CPU: layer_to_call is a {type(layer_to_call).__name__}, which cannot be "
                "called. Pass a module or a function."
            )
        if not isinstance(ID, str):
            raise Error(f"poptorch.CPU: the ID must be a string, got {type(ID).__name__}.")
        self._layer_to_call = layer_to_call
        self._ID = ID
        if isinstance(layer_to_call, nn.Module):
            listener: Any = op_listener.get()
            if listener is None:
                _freeze(layer_to_call)
            else:
                with listener.on_host():
                    _freeze(layer_to_call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the callable; while a model is compiled, put the call into the program.

        Args:
            *args: Positional arguments for the callable.
            **kwargs: Keyword arguments for the callable.

        Returns:
            The results of the callable. In a program: a tensor, or a list of tensors.

        Raises:
            Error: The call is inside the code of another CPU operation, or has other shapes than
                before, or the callable does not return tensors.
        """
        if _running.get():
            raise Error(
                f"poptorch.CPU '{self._ID}' is called inside of the CPU operation "
                f"'{_running.get()}'. No CPU operation may call another one: call the Python "
                "function directly there."
            )
        listener: Any = op_listener.get()
        if listener is None:
            return self._layer_to_call(*args, **kwargs)
        return listener.host_call(self, CallArguments.of(args, kwargs))

    def __repr__(self) -> str:
        return f"CPU({self._layer_to_call!r}, ID={self._ID!r})"


def _freeze(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_(False)


@dataclass(frozen=True)
class CallArguments:
    """The arguments of a call: its tensors, and where they are among the other arguments.

    Attributes:
        tensors: The tensors in the order of the arguments, including nested ones.
        leaves: The flat list of all values in the arguments, with None in the place of each tensor.
        spec: The structure of positional and keyword arguments.
    """

    tensors: tuple[torch.Tensor, ...]
    leaves: tuple[Any, ...]
    spec: TreeSpec

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
        """Return the arguments of a call."""
        leaves, spec = tree_flatten((args, kwargs))
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        rest = tuple(None if isinstance(leaf, torch.Tensor) else _Value(leaf) for leaf in leaves)
        return cls(tensors, rest, spec)

    def is_plain(self) -> bool:
        """Whether all arguments are positional tensors."""
        return self.spec == tree_flatten((self.leaves, {}))[1] and not any(self.leaves)

    def without_tensors(self) -> CallArguments:
        """Return a copy without the tensors, which keeps no tensor alive."""
        return replace(self, tensors=())

    def rebuilt(self, tensors: Sequence[torch.Tensor]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return the positional and keyword arguments, with other tensors in place of these."""
        following = iter(tensors)
        leaves = [next(following) if value is None else value.it for value in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs

    def has_same_rest(self, other: CallArguments) -> bool:
        """Whether another call has the same arguments apart from the tensors."""
        return self.spec == other.spec and self.leaves == other.leaves


@dataclass(frozen=True)
class _Value:
    """A Python value among arguments: two are equal if they are the same object."""

    it: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Value) and self.it is other.it

    def __hash__(self) -> int:
        return id(self.it)


@dataclass(frozen=True)
class TensorType:
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorType:
        """Return the type of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} {list(self.shape)}"


@contextmanager
def _random_numbers_from(state: torch.Tensor) -> Iterator[None]:
    """Set the state of the host's random numbers, and put the earlier state back at the end."""
    before = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(before)


@dataclass
class HostCall:
    """One place in ``forward`` where the host is called.

    Attributes:
        ID: The ID of the ``CPU`` object.
        function: The callable.
        arguments: The arguments of the call in ``forward``, without the tensors.
        source: The line of the call, ``file:line``; may be empty.
        wanted: For each tensor argument, whether its gradient is needed.
        results: The types of the tensors that the callable returned for zeros.
        differentiable: For each result, whether it has a gradient.
        is_list: Whether the callable returned a list or tuple.
    """

    ID: str
    function: Callable[..., Any]
    arguments: CallArguments
    source: str
    wanted: tuple[bool, ...]
    results: tuple[TensorType, ...] = ()
    differentiable: tuple[bool, ...] = ()
    is_list: bool = False
    _plain: bool = field(init=False)

    def __post_init__(self) -> None:
        self._plain = self.arguments.is_plain()

    @property
    def shown(self) -> str:
        """The name of the call in messages."""
        return f"poptorch.CPU '{self.ID}'" + (f", called at {self.source}," if self.source else "")

    @property
    def has_gradient(self) -> bool:
        """Whether a backward pass may differentiate the call."""
        return any(self.wanted) and any(self.differentiable)

    @property
    def all_results(self) -> list[TensorType]:
        """The results, and if the call has a gradient the random state from before the call."""
        if not self.has_gradient:
            return list(self.results)
        return [*self.results, TensorType.of(torch.get_rng_state())]

    def at(self, source: str) -> HostCall:
        """Return the same call at another line of ``forward``."""
        return replace(self, source=source)

    def try_with_zeros(self, types: Sequence[TensorType]) -> None:
        """Call the callable with zeros, and store the types of its results.

        Raises:
            Error: The callable does not return tensors that the device can hold.
        """
        zeros = [torch.zeros(each.shape, dtype=each.dtype, device="cpu") for each in types]
        with torch.enable_grad():
            result = self._call(self._differentiated(zeros)[1])
        found = self._tensors(result)
        for position, tensor in enumerate(found):
            is_dense = tensor.layout is torch.strided and tensor.is_cpu
            if not is_dense or tensor.dtype not in INPUTS:
                raise Error(
                    f"{self.shown} returns a tensor of {tensor.dtype} and {tensor.layout} on "
                    f"{tensor.device} as result {position}. It must return dense tensors on the "
                    f"host, with one of the dtypes {', '.join(map(dtype_name, INPUTS))}."
                )
        self.results = tuple(map(TensorType.of, found))
        self.differentiable = tuple(tensor.requires_grad for tensor in found)
        self.is_list = not isinstance(result, torch.Tensor)

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Call the callable for a micro-batch.

        Args:
            tensors: The arguments of the callable, which own their memory.

        Returns:
            The tensors that ``all_results`` describes.

        Raises:
            Error: The results differ from those for zeros in number, shape or dtype.
            BaseException: The exception of the callable.
        """
        state = torch.get_rng_state() if self.has_gradient else None
        results = self._checked(self._call(tensors))
        return results if state is None else [*results, state]

    def differentiate(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Call the callable under autograd.

        Args:
            tensors: The gradients of the differentiable results, then the arguments, then the
                random state from before the call in the forward pass.

        Returns:
            The gradients of the arguments that need one; zeros for arguments without one.

        Raises:
            Error: The results differ from those for zeros in number, shape or dtype.
            BaseException: The exception of the callable.
        """
        num_gradients = sum(self.differentiable)
        gradients = iter(tensors[:num_gradients])
        with torch.enable_grad():
            inputs, given = self._differentiated(tensors[num_gradients:-1])
            with _random_numbers_from(tensors[-1]):
                results = self._checked(self._call(given))
            pairs = [
                (result, next(gradients).to(result.dtype))
                for result, wanted in zip(results, self.differentiable, strict=True)
                if wanted
            ]
            pairs = [(result, gradient) for result, gradient in pairs if result.requires_grad]
            if not pairs:
                return [torch.zeros_like(tensor) for tensor in inputs]
            try:
                found = torch.autograd.grad(
                    [result for result, _ in pairs],
                    inputs,
                    [gradient for _, gradient in pairs],
                    allow_unused=True,
                )
            except BaseException as error:
                self._note(error, ", while its gradient was computed")
                raise
        return [
            torch.zeros_like(tensor) if gradient is None else gradient
            for tensor, gradient in zip(inputs, found, strict=True)
        ]

    def _differentiated(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the tensors to differentiate by, and the arguments for the callable."""
        inputs, given = [], []
        for tensor, wanted in zip(tensors, self.wanted, strict=True):
            if wanted:
                inputs.append(tensor.requires_grad_())
                tensor = tensor.clone()  # a leaf with a gradient must not be changed in place
            given.append(tensor)
        return inputs, given

    def _call(self, tensors: Sequence[torch.Tensor]) -> Any:
        args: Sequence[Any] = tensors
        kwargs: dict[str, Any] = {}
        if not self._plain:
            args, kwargs = self.arguments.rebuilt(tensors)
        running = _running.set(self.ID)
        ops, blocks = op_listener.set(None), block_listener.set(None)
        try:
            return self.function(*args, **kwargs)
        except BaseException as error:
            self._note(error)
            raise
        finally:
            block_listener.reset(blocks)
            op_listener.reset(ops)
            _running.reset(running)

    def _note(self, error: BaseException, when: str = "") -> None:
        """Add to an exception of the user's code where that code was called."""
        add_note = getattr(error, "add_note", None)  # from Python 3.11 on
        if add_note is not None:
            add_note(f"This was raised in {self.shown.rstrip(',')}{when}.")

    def _tensors(self, result: Any) -> list[torch.Tensor]:
        """Return the tensors of a result."""
        items = [result] if isinstance(result, torch.Tensor) else result
        if not isinstance(items, (list, tuple)):
            problem = f"{type(result).__name__!r}"
        elif not items:
            problem = f"{type(result).__name__!r} without any"
        else:
            others = [item for item in items if not isinstance(item, torch.Tensor)]
            if not others:
                return list(items)
            problem = f"{type(others[0]).__name__!r} in a {type(result).__name__}"
        raise Error(
            f"{self.shown} returns {problem}. It must return a tensor, or a list or tuple of "
            "tensors, not nested."
        )

    def _checked(self, result: Any) -> list[torch.Tensor]:
        found = self._tensors(result)
        if len(found) != len(self.results):
            raise Error(
                f"{self.shown} returns {len(found)} tensors where it returned {len(self.results)} "
                "when the model was compiled. The number of results must always be the same."
            )
        for position, (tensor, expected) in enumerate(zip(found, self.results, strict=True)):
            if tensor.dtype != expected.dtype or tensor.shape != expected.shape:
                raise Error(
                    f"{self.shown} returns {TensorType.of(tensor)} as result {position} where it "
                    f"returned {expected} when the model was compiled. The shapes and dtypes of "
                    "its results must always be the same."
                )
        return found
