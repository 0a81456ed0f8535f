"""Calls of the host in the middle of a program: ``CPU``, and what a program keeps of each call."""

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
"""ID of the CPU op whose code is running, empty outside of any."""


class HostListener(Protocol):
    """What the tracer does with calls of the host."""

    def on_host(self) -> AbstractContextManager[None]:
        """Run code as outside of the trace: on the host's tensors, with nothing recorded."""

    def host_call(self, cpu: CPU, arguments: CallArguments) -> torch.Tensor | list[torch.Tensor]:
        """Return the traced results of a call of the host."""


class CPU:
    """Calls a module or function on the host, in the middle of the program.

    While a model is compiled, the callable is called once with zeros: shapes and element types
    of its results must be the same ever after. Then each run calls it for every micro-batch, on the
    thread that called the model, with ordinary tensors of its own that it may keep and change.
    Outside of a model that is being compiled, calling this object calls the callable.

    Parameters of a module are not trained: their ``requires_grad`` is set to False. What they
    hold is read from the host when the module is called. In training the call has a gradient: the
    callable is called once more in the backward pass, and differentiated by autograd.

    A call whose results nobody uses is left out of the program, with a warning.

    Args:
        layer_to_call: A module, or anything else that can be called. It takes tensors, alone or in
            lists, tuples and dicts, and values of Python, which are those of the call in
            ``forward``. It returns a tensor, or a list or tuple of tensors; the call then
            gives a tensor or a list. Tensors that it returns are copied.
        ID: The name of the operation; no other object in the model has the same.

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
            *args: As the callable takes them.
            **kwargs: The same.

        Returns:
            What the callable returns. In a program: a tensor, or a list of them.

        Raises:
            Error: It is called inside of another one's code, or again with other shapes, or does
                not return tensors.
        """
        if _running.get():
            raise Error(
                f"poptorch.CPU '{self._ID}' is called inside of the CPU operation "
                f"'{_running.get()}'. No CPU operation may call another one: call the function "
                "itself there."
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
    """The arguments of a call: its tensors, and the places in the rest where they belong.

    Attributes:
        tensors: In the order of the arguments, nested ones included.
        leaves: All that the arguments consist of; None in the place of each tensor.
        spec: The structure of positional and keyword arguments.
    """

    tensors: tuple[torch.Tensor, ...]
    leaves: tuple[Any, ...]
    spec: TreeSpec

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallArguments:
        """Return those of a call."""
        leaves, spec = tree_flatten((args, kwargs))
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        rest = tuple(None if isinstance(leaf, torch.Tensor) else _Value(leaf) for leaf in leaves)
        return cls(tensors, rest, spec)

    def is_plain(self) -> bool:
        """Whether the arguments are tensors one after the other, and nothing else."""
        return self.spec == tree_flatten((self.leaves, {}))[1] and not any(self.leaves)

    def without_tensors(self) -> CallArguments:
        """Return the rest alone, which keeps no tensor alive."""
        return replace(self, tensors=())

    def rebuilt(self, tensors: Sequence[torch.Tensor]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Return positional and keyword arguments with other tensors in the place of these."""
        following = iter(tensors)
        leaves = [next(following) if value is None else value.it for value in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs

    def has_same_rest(self, other: CallArguments) -> bool:
        """Whether all but the tensors is the same in another call."""
        return self.spec == other.spec and self.leaves == other.leaves


@dataclass(frozen=True)
class _Value:
    """A value of Python among arguments: two are the same if they are one object."""

    it: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Value) and self.it is other.it

    def __hash__(self) -> int:
        return id(self.it)


@dataclass(frozen=True)
class TensorType:
    """Shape and element type of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorType:
        """Return that of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)} {list(self.shape)}"


@contextmanager
def _random_numbers_from(state: torch.Tensor) -> Iterator[None]:
    """Let the host draw the random numbers that follow a state, and then go on as it was."""
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
        ID: That of the ``CPU`` object.
        function: What is called.
        arguments: Those of the call in ``forward``; its tensors are forgotten.
        source: Line of the call, ``file:line``, maybe empty.
        wanted: For each tensor that is given, whether its gradient is asked for.
        results: What the callable returned when it was given zeros.
        differentiable: For each of these, whether gradients go through it.
        is_list: Whether it returned a list or tuple.
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
        """What messages call it."""
        return f"poptorch.CPU '{self.ID}'" + (f", called at {self.source}," if self.source else "")

    @property
    def has_gradient(self) -> bool:
        """Whether a backward pass may differentiate it."""
        return any(self.wanted) and any(self.differentiable)

    @property
    def all_results(self) -> list[TensorType]:
        """The results, and with gradients to come the state that random numbers were in before."""
        if not self.has_gradient:
            return list(self.results)
        return [*self.results, TensorType.of(torch.get_rng_state())]

    def at(self, source: str) -> HostCall:
        """Return the same call at another line of ``forward``."""
        return replace(self, source=source)

    def try_with_zeros(self, types: Sequence[TensorType]) -> None:
        """Call the callable with zeros, and note what it returns.

        Raises:
            Error: It does not return tensors that the device can hold.
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
                    f"{tensor.device} as result {position}. It must return dense tensors of the "
                    f"host, of one of the types {', '.join(map(dtype_name, INPUTS))}."
                )
        self.results = tuple(map(TensorType.of, found))
        self.differentiable = tuple(tensor.requires_grad for tensor in found)
        self.is_list = not isinstance(result, torch.Tensor)

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Call the callable for a micro-batch.

        Args:
            tensors: What it is given, with memory of their own.

        Returns:
            What ``all_results`` describes.

        Raises:
            Error: It returns something else than it did when it was given zeros.
            BaseException: What it raises.
        """
        state = torch.get_rng_state() if self.has_gradient else None
        results = self._checked(self._call(tensors))
        return results if state is None else [*results, state]

    def differentiate(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Call the callable under autograd.

        Args:
            tensors: The gradients of the differentiable results, then what it is given, then the
                state of random numbers that it found in the forward pass.

        Returns:
            The gradients of the tensors that want one; zeros for those that have none.

        Raises:
            Error: It returns something else than it did when it was given zeros.
            BaseException: What it raises.
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
        """Return what gradients are asked for, and what to give to the callable."""
        inputs, given = [], []
        for tensor, wanted in zip(tensors, self.wanted, strict=True):
            if wanted:
                inputs.append(tensor.requires_grad_())
                tensor = tensor.clone()  # what asks for a gradient must not be changed in place
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
        """Let an exception of the user's code say where that was called."""
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
                "when the model was compiled. It must always return as many as for zeros."
            )
        for position, (tensor, expected) in enumerate(zip(found, self.results, strict=True)):
            if tensor.dtype != expected.dtype or tensor.shape != expected.shape:
                raise Error(
                    f"{self.shown} returns {TensorType.of(tensor)} as result {position} where it "
                    f"returned {expected} when the model was compiled. Shapes and element types "
                    "of its results must always be those for zeros."
                )
        return found
