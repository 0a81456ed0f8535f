"""The common structure of all elements of an asynchronously loaded dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from popsim_torch.arguments.parsers import ICustomArgParser, registered_parsers
from popsim_torch.errors import UsageTypeError, UsageValueError

__all__ = ["Layout", "TensorType", "tensor_types"]


class TensorType(NamedTuple):
    """The dtype and the shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def tensor_types(tensors: Sequence[torch.Tensor]) -> list[TensorType]:
    """Return the types of some tensors."""
    return [TensorType(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]


class Layout:
    """The container around the tensors of each element, as in the first element.

    Args:
        element: The first element: a tensor, a flat list or tuple of tensors, a dict of tensors or
            an object of exactly a type of ``registerCustomArgParser``.

    Raises:
        UsageTypeError: The element is something else.
    """

    def __init__(self, element: Any) -> None:
        self._kind: type[Any] = type(element)
        self._is_tensor = isinstance(element, torch.Tensor)
        self._keys: list[Any] | None = list(element) if isinstance(element, dict) else None
        self._parser: ICustomArgParser | None = registered_parsers().get(self._kind)
        self._original = None if self._parser is None else element
        self._num_tensors = len(self._parts(element))

    def flatten(self, element: Any) -> list[torch.Tensor]:
        """Return the tensors of an element.

        Args:
            element: Another element of the dataset.

        Raises:
            UsageTypeError: It has another structure than the first one, or contains something else
                than tensors.
        """
        same_keys = self._keys is None or (
            isinstance(element, dict) and element.keys() == set(self._keys)
        )
        if type(element) is not self._kind or not same_keys:
            raise self._changed(_show(element))
        tensors = self._parts(element)
        if len(tensors) != self._num_tensors:
            raise self._changed(f"a {self._kind.__name__} with {len(tensors)} tensors")
        for tensor in tensors:
            _check_tensor(tensor)
        return tensors

    def build(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return an element: a tensor, a list, a dict, or the object that the parser reconstructs.

        Args:
            tensors: The result of ``flatten``, or other tensors in their place.
        """
        if self._parser is not None:
            return self._parser.reconstruct(self._original, iter(tensors))
        if self._keys is not None:
            return dict(zip(self._keys, tensors, strict=True))
        return tensors[0] if self._is_tensor else list(tensors)

    def __getstate__(self) -> dict[str, Any]:
        """Return what ``build`` needs: the type may exist in only one process."""
        return {**self.__dict__, "_kind": None}

    def _parts(self, element: Any) -> list[torch.Tensor]:
        if self._parser is not None:
            return list(self._parser.yieldTensors(element))
        if isinstance(element, torch.Tensor):
            return [element]
        if self._keys is not None:
            return [element[key] for key in self._keys]
        if isinstance(element, (list, tuple)):
            return list(element)
        raise UsageTypeError(
            f"AsynchronousDataAccessor: an element of the dataset is {_show(element)}. It must be "
            "a tensor, a flat list or tuple of tensors, a dict of tensors, or of a type of "
            "registerCustomArgParser itself."
        )

    def _changed(self, actual: str) -> UsageTypeError:
        parts = f"{self._num_tensors} tensors" if self._keys is None else f"the keys {self._keys}"
        return UsageTypeError(
            f"AsynchronousDataAccessor: an element of the dataset is {actual}, but the first one "
            f"was a {self._kind.__name__} with {parts}. All elements must have the same structure."
        )


def _check_tensor(tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise UsageTypeError(
            f"AsynchronousDataAccessor: an element of the dataset holds {_show(tensor)}. Elements "
            "must be flat containers of tensors: convert numbers to tensors, and do not nest "
            "containers."
        )
    if (
        tensor.device.type != "cpu"
        or tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.is_quantized
    ):
        raise UsageValueError(
            f"AsynchronousDataAccessor: an element of the dataset holds a tensor of layout "
            f"{tensor.layout} on device {tensor.device}. Only dense tensors in the memory of the "
            "CPU can be shared: convert it in the dataset."
        )


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return f"a {type(value).__name__} with the keys {list(value)}"
    return f"a {type(value).__name__}"
