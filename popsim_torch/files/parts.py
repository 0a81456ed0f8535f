"""The parts of a file: values, each as a section of JSON and a section of safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import safetensors.torch
import torch

from popsim_torch.errors import Error
from popsim_torch.files.values import Encoder, decode

__all__ = ["pack", "unpack"]

_TENSORS = "{name}.tensors"


def pack(
    name: str, value: Any, where: str, placeholders: Mapping[int, int] | None = None
) -> dict[str, bytes]:
    """Return the sections of a part.

    Args:
        name: The name of the part.
        value: Plain data; see ``Encoder``.
        where: The user's name for the value, for the error.
        placeholders: See ``Encoder``.

    Raises:
        Error: The value is not plain data.
    """
    encoder = Encoder(placeholders)
    try:
        text = json.dumps(encoder(value, where), separators=(",", ":"), allow_nan=False)
        tensors = _storable(encoder.tensors)
        data = safetensors.torch.save({str(i): tensor for i, tensor in enumerate(tensors)})
    except (KeyError, ValueError, RecursionError, safetensors.SafetensorError) as error:
        raise Error(f"{where} cannot be written to a file: {error!r}.") from error
    return {name: text.encode(), _TENSORS.format(name=name): data}


def unpack(
    sections: Mapping[str, bytes], name: str, placeholders: Sequence[torch.Tensor] = ()
) -> Any:
    """Return the value of a part.

    Args:
        sections: The sections of the file.
        name: The name of the part.
        placeholders: See ``decode``.

    Raises:
        ValueError: The part is missing, or is not a valid value.
    """
    try:
        data = json.loads(sections[name])
        loaded = safetensors.torch.load(sections[_TENSORS.format(name=name)])
        tensors = [loaded[str(i)] for i in range(len(loaded))]
        return decode(data, tensors, placeholders)
    except KeyError as error:
        raise ValueError(f"the section {error} is missing") from error
    except (safetensors.SafetensorError, RecursionError) as error:
        raise ValueError(f"the part '{name}' cannot be read: {error!r}") from error


def _storable(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors with the same values, each with its own contiguous memory."""
    memory = set[int]()
    found = []
    for tensor in tensors:
        own = tensor.detach().resolve_neg().resolve_conj().contiguous()
        storage = own.untyped_storage()
        if storage.nbytes() != own.nbytes or storage.data_ptr() in memory:
            own = own.clone()
        memory.add(own.untyped_storage().data_ptr())
        found.append(own)
    return found
