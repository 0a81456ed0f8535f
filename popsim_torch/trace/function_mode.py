"""Watches the torch functions that user code calls while it is traced.

Forces factory functions onto the device, turns tensors from outside into constants, refuses what
cannot be traced (reading values, leaving the device), records losses, and asks for the gradient of
every differentiable result to be named.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map

from popsim_torch.errors import Error
from popsim_torch.trace.device import DEVICE
from popsim_torch.trace.losses import LOSS_FUNCTIONS, TRACEABLE
from popsim_torch.trace.mixed_types import in_one_type
from popsim_torch.trace.recurrent import RECURRENT_FUNCTIONS, recurrent_call

_READS_VALUES = frozenset(
    {"item", "__bool__", "__int__", "__float__", "__index__", "__complex__", "tolist", "is_nonzero"}
)
_LEAVES_DEVICE = frozenset({"cpu", "numpy", "__array__"})
_PRINTS = frozenset({"__repr__", "__str__", "__format__"})
_DROPOUTS = frozenset(
    {
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "dropout_",
        "alpha_dropout",
        "alpha_dropout_",
        "feature_dropout",
        "feature_dropout_",
        "feature_alpha_dropout",
        "feature_alpha_dropout_",
    }
)
_RECURRENT_TRAIN = 6  # position of the argument that turns dropout between layers on
# Where functions take class indices that must be 64 bits long.
_INDEX_ARGUMENT = {
    "cross_entropy_loss": 1,
    "multi_margin_loss": 1,
    "nll_loss": 1,
    "nll_loss2d": 1,
    "nll_loss_nd": 1,
    "one_hot": 0,
    "take": 1,
    "take_along_dim": 1,
}
_FROM_HOST_DATA = frozenset({torch.tensor, torch.as_tensor, torch.from_numpy, torch.asarray})
_OVERRIDE_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


class FunctionListener(Protocol):
    """What the tracer does with what the mode sees."""

    def known(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the traced tensor for a parameter or buffer of the model, else ``tensor``."""

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a traced tensor for the data of a host tensor."""

    def before_call(self, function: Callable[..., Any]) -> None:
        """Take note that user code calls ``function``."""

    def after_call(self, result: torch.Tensor) -> None:
        """Take note of a tensor that a function returned or changed."""

    def mark_loss(self, loss: torch.Tensor) -> None:
        """Take note of the result of a loss function."""


@contextlib.contextmanager
def _inner_calls_visible() -> Iterator[None]:
    """Let the Python functions of ``torch.nn.functional`` run their bodies under the mode.

    They ask whether a mode is active and, if so, hand themselves over to it as a whole. The mode
    has seen that call already; now it wants the calls that their bodies are made of.
    """
    saved = {name: getattr(F, name) for name in _OVERRIDE_CHECKS}
    try:
        for name in _OVERRIDE_CHECKS:
            setattr(F, name, lambda *_: False)
        yield
    finally:
        for name, check in saved.items():
            setattr(F, name, check)


def _is_cpu(value: Any) -> bool:
    if isinstance(value, str):
        return value == "cpu"
    return isinstance(value, torch.device) and value.type == "cpu"


class FunctionMode(TorchFunctionMode):
    """The mode that is active while ``forward`` runs.

    Args:
        listener: Told of every call.
        training: False turns every dropout into the identity.
        fake_mode: The mode of this trace's tensors.
    """

    def __init__(
        self, listener: FunctionListener, training: bool, fake_mode: FakeTensorMode
    ) -> None:
        super().__init__()
        self._fake_mode = fake_mode
        self._listener = listener
        self._training = training

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Handle one call of a torch function."""
        name = getattr(func, "__name__", "")
        kwargs = dict(kwargs or {})
        args, kwargs = tree_map(self._known, (args, kwargs))
        if name == "__get__" or name == "__set__":
            _refuse_new_data(func, name, args)
            return func(*args, **kwargs)
        if self._stays_on_host(func, args, kwargs):
            return _call_on_host(func, args, kwargs)
        if name in _PRINTS:
            return _placeholder(args[0])
        _refuse_host(name, args, kwargs)
        if func in _FROM_HOST_DATA:
            kwargs.pop("device", None)
            return self._listener.constant(_call_on_host(func, args, kwargs))
        if name == "new_tensor":
            data, dtype = args[1], kwargs.get("dtype") or args[0].dtype
            return self._listener.constant(_call_on_host(torch.tensor, (data,), {"dtype": dtype}))
        args, kwargs = tree_map(self._lifted, (args, kwargs))
        args = _with_long_indices(name, args)
        args, kwargs = in_one_type(name, args, kwargs)
        if func in _device_constructors():
            kwargs["device"] = DEVICE
        if not self._training:
            args, kwargs, unchanged = _without_dropout(name, args, kwargs)
            if unchanged is not None:
                return unchanged
        return self._call(func, name, args, kwargs)

    def _known(self, value: Any) -> Any:
        """Return the traced tensor for a parameter or buffer, and the device for its names."""
        if isinstance(value, FakeTensor) and value.fake_mode is not self._fake_mode:
            raise Error(
                f"forward uses a tensor of shape {tuple(value.shape)} that was made while another "
                "model, or this one before, was traced; it has no values. Make it in __init__, or "
                "anew in each forward, instead of keeping it."
            )
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            return self._listener.known(value)
        if isinstance(value, torch.device) and value.type == "ipu":
            return DEVICE
        if isinstance(value, str) and value in ("ipu", "ipu:0"):
            return DEVICE
        return value

    def _lifted(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            return self._listener.constant(value)
        return value

    def _stays_on_host(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether a call only concerns host tensors: it is computed now, not traced."""
        values = tree_leaves((args, kwargs))
        if any(isinstance(value, FakeTensor) or value == DEVICE for value in values):
            return False
        if func in _device_constructors():
            return _is_cpu(kwargs.get("device"))
        return any(isinstance(value, torch.Tensor) for value in values)

    def _call(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._listener.before_call(func)
        body: Any = TRACEABLE.get(func, func)
        if getattr(func, "__module__", None) == F.__name__ and hasattr(func, "__code__"):
            with _inner_calls_visible(), self:
                result = body(*args, **kwargs)
        elif name == "cross_entropy_loss":
            result = self._cross_entropy(func, args, kwargs)
        elif (recurrent := recurrent_call(name, args, kwargs)) is not None:
            with self:
                result = recurrent()
        else:
            result = func(*args, **kwargs)
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        for tensor in _tensors(args[0] if in_place and args else result):
            self._listener.after_call(tensor)
        if func in LOSS_FUNCTIONS:
            self._listener.mark_loss(result)
        return result

    def _cross_entropy(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run cross entropy on class indices as its two halves, so that both can be observed."""
        logits, target, weight, reduction, ignore_index, smoothing = args
        if target.dtype.is_floating_point or smoothing != 0:
            return func(*args, **kwargs)
        with self:
            log_probabilities = torch.log_softmax(logits, 0 if logits.dim() == 1 else 1)
            return torch._C._nn.nll_loss_nd(
                log_probabilities, target, weight, reduction, ignore_index
            )


def _call_on_host(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with disable_proxy_modes_tracing(), unset_fake_temporarily():
        return func(*args, **kwargs)


def _refuse_new_data(func: Callable[..., Any], name: str, args: tuple[Any, ...]) -> None:
    if name == "__set__" and getattr(func, "__self__", None) is torch.Tensor.data:
        raise Error(
            f"Assigning Tensor.data in forward is not supported (tensor of shape "
            f"{tuple(args[0].shape)}). Compute a new tensor, or use Tensor.copy_."
        )


def _with_long_indices(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Widen 32-bit class indices: the device's integers have 32 bits, PyTorch asks for 64."""
    position = _INDEX_ARGUMENT.get(name)
    if position is None or len(args) <= position:
        return args
    indices = args[position]
    if isinstance(indices, torch.Tensor) and indices.dtype in (torch.int16, torch.int32):
        return (*args[:position], indices.long(), *args[position + 1 :])
    return args


def _refuse_host(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse calls that read the value of a device tensor or take it to the host."""
    if not args or not isinstance(args[0], FakeTensor):
        return
    if name in _READS_VALUES:
        raise Error(
            f"aten::item is only supported in eager mode: forward reads the value of a tensor "
            f"(Tensor.{name}, for example through `if tensor:`, float(tensor) or "
            "tensor.item()), which does not exist while the model is traced. Use torch.where, "
            "or return the tensor and decide outside of the model."
        )
    leaves = name in _LEAVES_DEVICE or (
        name == "to" and any(_is_cpu(value) for value in (*args[1:], *kwargs.values()))
    )
    if leaves:
        raise Error(
            f"Illegal move to CPU (Tensor.{name}): inside forward, tensors live on the device. "
            "Return the tensor from the model, or anchor it, to see it on the host."
        )


def _tensors(result: Any) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for item in result:
            yield from _tensors(item)


def _placeholder(tensor: Any) -> str:
    if not isinstance(tensor, torch.Tensor):
        return repr(tensor)
    return (
        f"<tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, on the device: "
        "no value while the model is traced; see poptorch.ipu_print_tensor>"
    )


def _without_dropout(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], torch.Tensor | None]:
    """Return the call's arguments with dropout off, or the tensor it returns unchanged."""
    if name in _DROPOUTS:
        return args, kwargs, args[0] if args else kwargs["input"]
    if name == "scaled_dot_product_attention":
        # query, key, value, mask, dropout_p
        args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        if "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
    if name in RECURRENT_FUNCTIONS and len(args) > _RECURRENT_TRAIN:
        position = _RECURRENT_TRAIN if isinstance(args[3], bool) else _RECURRENT_TRAIN + 1
        args = (*args[:position], False, *args[position + 1 :])
    return args, kwargs, None
