"""Eager PyTorch that rounds otherwise: shows how much of a result is rounding."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class OtherRounding(TorchDispatchMode):
    """Moves every float32 result, forward and backward, by up to a unit in its last place.

    What a program computes under it is as right as what it computes without: another library, or
    another order of sums, could have given it.

    Args:
        seed: Runs with other seeds round otherwise.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = result if isinstance(result, tuple | list) else [result]
        declared = func._schema.returns
        # A list of tensors is declared once.
        declared = declared if len(declared) == len(tensors) else declared * len(tensors)
        for entry, tensor in zip(declared, tensors, strict=True):
            is_view = entry.alias_info is not None and not entry.alias_info.is_write
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32 and not is_view:
                self._move(tensor)
        return result

    def _move(self, tensor: torch.Tensor) -> None:
        random = torch.rand(tensor.shape, generator=self._generator, dtype=torch.float64)
        factor = 1 + torch.finfo(torch.float32).eps * (2 * random - 1)
        tensor.copy_(tensor.double() * factor)
