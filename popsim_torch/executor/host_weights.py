"""Wraps the user's model so that reads of its weights on the host return the trained values.

While a model trains on the device, its host tensors are out of date. ``wrap`` gives the model and
its tensors classes that fetch the weights immediately before a read. A program sees current values
without an explicit copy, and a loop that only trains copies nothing. ``Wrapping.undo`` reverts it.

The objects stay the same: only ``__class__`` changes. So optimizers, hooks and tied tensors still
work, and this package puts nothing into a ``__dict__``, from where it could get into a saved file.
The link to the executor is an attribute of the classes, and every ``wrap`` makes new classes;
nothing here keeps the executor, the model or a tensor alive.

Torch refuses one call: ``nn.Parameter(wrapped)``. Write ``nn.Parameter(wrapped.detach())``.
Some code reads tensors without a look at their class, and sees the values of the last copy: code
that ``torch.jit`` has compiled, and transforms such as ``torch.func.grad`` and ``torch.vmap``. Call
``copyWeightsToHostIfNeeded()`` before such code.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from popsim_torch.errors import UsageRuntimeError
from popsim_torch.executor.gradient_reads import GradientReads
from popsim_torch.private_torch.modes import (
    DisableTorchDispatch,
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
)
from popsim_torch.private_torch.module_parts import own_buffers, own_parameters

__all__ = [
    "METADATA",
    "Wrapping",
    "adopt",
    "is_trained",
    "is_wrapped",
    "num_switches",
    "plain",
    "without_sync",
    "wrap",
]

_quiet: ContextVar[bool] = ContextVar("popsim_torch_host_weights_quiet", default=False)

_METADATA_ATTRIBUTES = """
    _backward_hooks _cdata _grad _version device dtype grad grad_dtype grad_fn is_cpu is_cuda
    is_ipu is_leaf is_meta is_mkldnn is_nested is_quantized is_sparse is_sparse_csr itemsize layout
    name nbytes ndim output_nr requires_grad retains_grad shape
"""
_METADATA_METHODS = """
    __hash__ __len__ _is_view dense_dim dim element_size get_device is_complex is_conj is_contiguous
    is_floating_point is_inference is_neg is_same_size is_shared is_signed ndimension nelement
    numel register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad size
    sparse_dim storage_offset stride
"""
_METADATA_FUNCTIONS = "get_device is_complex is_conj is_floating_point is_neg is_signed numel"
_SETTERS = "_backward_hooks _grad grad requires_grad"

# Functions that do not read the values of a tensor, in the form of ``__torch_function__``.
METADATA: frozenset[Any] = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _METADATA_ATTRIBUTES.split()]
    + [getattr(torch.Tensor, name).__set__ for name in _SETTERS.split()]
    + [getattr(torch.Tensor, name) for name in _METADATA_METHODS.split()]
    + [getattr(torch, name) for name in _METADATA_FUNCTIONS.split()]
)
# Functions that choose whether a tensor is trained.
_SWITCHES = (torch.Tensor.requires_grad.__set__, torch.Tensor.requires_grad_)  # type: ignore[attr-defined]
_num_switches = 0
_GRADIENT = inspect.getattr_static(torch.Tensor, "grad").__get__
_PLAIN_FUNCTION = nn.Parameter.__torch_function__  # "nothing to override", as torch marks it


def wrap(model: nn.Module, sync: Callable[[], bool], destroy: Callable[[], None]) -> Wrapping:
    """Make every read of a model's weights fetch them from the device first, in place.

    The model gets the class ``Poptorch<ClassName>``, a subclass of its own class with the extra
    methods ``destroy()`` and ``copyWeightsToHostIfNeeded()``. Its parameters and buffers get
    subclasses of their own classes; lazy parameters without a shape do not change. A tensor that
    two wrapped models share syncs with both.

    Args:
        model: The user's model; it stays the same object.
        sync: Copies device to host if the device is ahead; returns whether it did. It is called
            often, so it must be cheap if there is nothing to copy. Reads inside it do not call it
            again.
        destroy: The function that ``model.destroy()`` calls; it must undo the wrapping if it
            releases the device. Bound methods are held weakly, other callables strongly.

    Returns:
        The object that can undo the wrapping.

    Raises:
        UsageRuntimeError: The model is wrapped already.
    """
    if is_wrapped(model):
        raise UsageRuntimeError(
            f"The model {type(model).__name__} is already wrapped for training. Call destroy() on "
            "it, or on the executor that wrapped it, before wrapping it again. An executor that "
            "was never compiled must be deleted instead (del executor)."
        )
    link = Wrapping(sync, destroy)
    model_class = _model_class(type(model), link)
    try:
        _set_class(model, model_class)
        link.add_model(model)
        adopt(model)
    except BaseException:
        link.undo()
        raise
    return link


def is_wrapped(model: nn.Module) -> bool:
    """Return whether :func:`wrap` was called on this model, or on the one it was copied from.

    Args:
        model: Any model.
    """
    return isinstance(model, _WrappedModel)


def is_trained(tensor: torch.Tensor) -> bool:
    """Return whether a tensor belongs to a wrapped model whose executor lives."""
    return any(link.is_open() for link in _links(tensor))


def num_switches() -> int:
    """Return how often ``requires_grad`` of a tensor of a wrapped model was set."""
    return _num_switches


def adopt(model: nn.Module) -> None:
    """Wrap the tensors that a wrapped model got after it was wrapped.

    This happens automatically after ``model.to()``, ``model.half()`` and similar methods, and after
    ``load_state_dict(assign=True)``.

    Args:
        model: A model; not changed if it is not wrapped.
    """
    if not isinstance(model, _WrappedModel):
        return
    link = model._popsim_link
    for tensor in _tensors(model):
        links = _links(tensor)
        if link not in links and not is_lazy(tensor):
            _set_class(tensor, _tensor_class(_own_class(tensor), (*links, link)))


@contextlib.contextmanager
def without_sync() -> Iterator[None]:
    """Read and write host tensors in this scope without a fetch: for copies of this package."""
    token = _quiet.set(True)
    try:
        yield
    finally:
        _quiet.reset(token)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached ``torch.Tensor`` on the same storage, without fetching weights.

    In-place changes are visible in both tensors; an assignment to ``tensor.data`` separates them.

    Args:
        tensor: A tensor of any class, wrapped or not.
    """
    with DisableTorchFunction(), DisableTorchDispatch():
        return tensor.detach()


class Wrapping:
    """Connects the classes of one wrapped model to its executor, and keeps neither alive."""

    def __init__(self, sync: Callable[[], bool], destroy: Callable[[], None]) -> None:
        self._sync = _weakly(sync)
        self._destroy = _weakly(destroy)
        self._models: list[weakref.ref[nn.Module]] = []
        self.closed = False
        self.tensor_classes: dict[Any, type[torch.Tensor]] = {}
        self.gradient_reads = GradientReads()

    def sync(self) -> bool:
        """Fetch the weights if the host's are older; return whether it did."""
        if self.closed or _quiet.get():
            return False
        function = self._sync()
        if function is None:
            return False
        with without_sync():
            return bool(function())

    def is_open(self) -> bool:
        """Return whether the model is wrapped still, and its executor lives."""
        return not self.closed and self._sync() is not None

    def destroy(self) -> None:
        """Ask the executor to release the model; if the executor is gone, undo the wrapping."""
        function = self._destroy()
        if function is None:
            self.undo()
        else:
            function()

    def undo(self) -> None:
        """Restore the classes of the model, of its copies and of all their tensors.

        It copies nothing from the device: fetch the weights first if they are needed. A second call
        does nothing, and an object that was wrapped again is not changed. A tensor that has left
        the model is restored at its next use.
        """
        if self.closed:
            return
        self.closed = True
        for model in self.models():
            for tensor in _tensors(model):
                _drop(tensor, self)
            if isinstance(model, _WrappedModel):
                _set_class(model, model._popsim_class)

    def add_model(self, model: nn.Module) -> None:
        """Remember a model that has this link's class."""
        self._models = [ref for ref in self._models if ref() is not None]
        self._models.append(weakref.ref(model))

    def models(self) -> list[nn.Module]:
        """Return the models that are still alive."""
        return [model for ref in self._models if (model := ref()) is not None]


class _HostTensor(torch.Tensor):
    """The common methods of wrapped parameters and buffers; comes before their own class."""

    __slots__ = ()
    _popsim_class: ClassVar[type[torch.Tensor]]
    _popsim_links: ClassVar[tuple[Wrapping, ...]]

    def __init_subclass__(cls, **_: Any) -> None:
        """Do not call the hook of a user's class: the generated class is not the user's."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SWITCHES:
            global _num_switches
            _num_switches += 1
        if func not in METADATA:
            for kind in types:
                if issubclass(kind, _HostTensor):
                    _fetch(kind._popsim_links, args, kwargs)
        # From here on, the tensors count as members of their own classes: if an argument has a
        # user's tensor class that overrides functions, that class decides.
        own = [kind._popsim_class if issubclass(kind, _HostTensor) else kind for kind in types]
        overriding = tuple(
            kind
            for kind in dict.fromkeys(own)
            if kind is not torch.Tensor and kind.__torch_function__ is not _PLAIN_FUNCTION
        )
        for kind in overriding:
            result = kind.__torch_function__(func, overriding, args, kwargs)
            if result is not NotImplemented:
                return result
        if overriding:
            return NotImplemented
        with DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if func == _GRADIENT and result is None and not _quiet.get():
            for link in _links(args[0]):
                link.gradient_reads.notice()
        return result

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        _fetch(self._popsim_links, (self,), {})
        with _as_own_class(self):
            return self.__repr__(**kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        _fetch(self._popsim_links, (self,), {})
        with _as_own_class(self):
            return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _fetch(self._popsim_links, (self,), {})
        with _as_own_class(self):
            return self.__reduce_ex__(protocol)


class _WrappedModel(nn.Module):
    """The common methods of wrapped models; comes before their own class."""

    __slots__ = ()
    _popsim_class: ClassVar[type[nn.Module]]
    _popsim_link: ClassVar[Wrapping]

    def __init_subclass__(cls, **_: Any) -> None:
        """Do not call the hook of a user's class: the generated class is not the user's."""

    def destroy(self) -> None:
        """Destroy the executor that trains this model; see ``PoplarExecutor.destroy``."""
        self._popsim_link.destroy()

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copy the weights from the device if they changed there; return whether they did."""
        return self._popsim_link.sync()

    def __copy__(self) -> Any:
        link, wrapped_class = self._popsim_link, type(self)
        with _as_own_class(self):
            own_class = type(self)
            duplicate = copy.copy(self)
        if type(duplicate) is own_class and not link.closed:
            _set_class(duplicate, wrapped_class)
            link.add_model(duplicate)
        return duplicate

    def __deepcopy__(self, memo: Any) -> Any:
        self._popsim_link.sync()
        with _as_own_class(self):
            return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._popsim_link.sync()
        with _as_own_class(self):
            reduced = self.__reduce_ex__(protocol)
        if isinstance(reduced, str):
            return reduced
        # pickle refuses a plain ``copyreg.__newobj__`` for a class that is not ``__class__``.
        return functools.partial(reduced[0]), *reduced[1:]


_READING_METHODS = "__call__ buffers named_buffers named_parameters parameters state_dict"
_REPLACING_METHODS = "_apply load_state_dict"


def _model_class(own_class: type[nn.Module], link: Wrapping) -> type[nn.Module]:
    body: dict[str, Any] = {"_popsim_class": own_class, "_popsim_link": link}
    for name in _READING_METHODS.split():
        body[name] = _synced(getattr(own_class, name), link, replaces=False)
    for name in _REPLACING_METHODS.split():
        body[name] = _synced(getattr(own_class, name), link, replaces=True)
    return cast(type[nn.Module], _subclass(_WrappedModel, own_class, body))


def _synced(method: Callable[..., Any], link: Wrapping, *, replaces: bool) -> Callable[..., Any]:
    """Return a method of the user's class that syncs first and adopts tensors at its end."""

    @functools.wraps(method)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        link.sync()
        try:
            return method(self, *args, **kwargs)
        finally:
            if replaces:
                adopt(self)

    return call


def _tensor_class(own_class: type[torch.Tensor], links: tuple[Wrapping, ...]) -> type[torch.Tensor]:
    classes = links[-1].tensor_classes
    key = (own_class, links)
    if key not in classes:
        body = {"_popsim_class": own_class, "_popsim_links": links}
        classes[key] = _subclass(_HostTensor, own_class, body)
    return classes[key]


def _subclass(mixin: type[Any], own_class: type[Any], body: dict[str, Any]) -> Any:
    name = f"Poptorch{own_class.__name__}"
    outer, dot, _ = own_class.__qualname__.rpartition(".")
    body = body | {
        "__doc__": own_class.__doc__,
        "__module__": own_class.__module__,
        "__qualname__": f"{outer}{dot}{name}",
    }
    return types.new_class(name, (mixin, own_class), {}, lambda namespace: namespace.update(body))


def _fetch(links: tuple[Wrapping, ...], args: Any, kwargs: dict[str, Any]) -> None:
    """Sync every link; restore arguments whose link was closed in the meantime."""
    for link in links:
        if link.closed:
            for value in (*args, *kwargs.values()):
                if isinstance(value, _HostTensor):
                    _drop(value, link)
        else:
            link.sync()


def _drop(tensor: torch.Tensor, link: Wrapping) -> None:
    links = _links(tensor)
    if link in links:
        others = tuple(other for other in links if other is not link)
        own_class = _own_class(tensor)
        _set_class(tensor, _tensor_class(own_class, others) if others else own_class)


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers of a model; tied tensors once for each of their names."""
    for module in nn.Module.modules(model):
        for tensor in (*own_parameters(module).values(), *own_buffers(module).values()):
            if tensor is not None:
                yield tensor


def _links(tensor: torch.Tensor) -> tuple[Wrapping, ...]:
    return cast("tuple[Wrapping, ...]", getattr(type(tensor), "_popsim_links", ()))


def _own_class(tensor: torch.Tensor) -> type[torch.Tensor]:
    return cast(type[torch.Tensor], getattr(type(tensor), "_popsim_class", type(tensor)))


def _set_class(target: Any, kind: type[Any]) -> None:
    object.__setattr__(target, "__class__", kind)  # not the __setattr__ of the user's class


@contextlib.contextmanager
def _as_own_class(target: Any) -> Iterator[None]:
    """Give a wrapped object its own class in this scope, for code that reads ``type(target)``."""
    wrapped_class = type(target)
    own_class = getattr(wrapped_class, "_popsim_class", wrapped_class)
    _set_class(target, own_class)
    try:
        yield
    finally:
        if type(target) is own_class:
            _set_class(target, wrapped_class)


def _weakly(function: Callable[[], Any]) -> Callable[[], Callable[[], Any] | None]:
    if isinstance(function, types.MethodType):
        return weakref.WeakMethod(function)
    return lambda: function
