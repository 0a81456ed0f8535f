"""Matrix products that are computed slice by slice."""

from __future__ import annotations

import torch

from popsim_torch.dtypes import returned_dtype
from popsim_torch.enums import MatMulSerializationMode
from popsim_torch.errors import Error, UsageAssertionError
from popsim_torch.ops import op_listener
from popsim_torch.typed_torch import broadcast_shapes

__all__ = ["serializedMatMul"]

_FLOATING = (torch.float16, torch.float32)
# Which axis of a product ``[rows, depth] @ [depth, columns]`` is cut.
_SLICES = {
    MatMulSerializationMode.InputChannels: "rows",
    MatMulSerializationMode.ReducingDim: "depth",
    MatMulSerializationMode.OutputChannels: "columns",
}


def serializedMatMul(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    mode: MatMulSerializationMode,
    factor: int = 0,
    keep_precision: bool = False,
) -> torch.Tensor:
    """Return ``lhs @ rhs``, computed in slices one after another to save memory.

    The additional memory of a product is that of one slice: for operands converted to the dtype of
    the sums, and for the result before rounding. The gradients are computed in slices, too. The
    values are those of ``torch.matmul``, except for the rounding of sums.

    Args:
        lhs: As for ``torch.matmul``: a vector, a matrix, or matrices with leading batch dimensions;
            floating point.
        rhs: As ``lhs``. If one operand is a parameter, it is converted to the dtype of the other
            one; otherwise, if the dtypes differ, the result is float32.
        mode: The dimension to slice: ``InputChannels`` the rows of ``lhs``, ``ReducingDim`` the
            dimension that both share, ``OutputChannels`` the columns of ``rhs``; ``Disabled`` none.
        factor: The number of slices, which must divide the sliced dimension. Ignored with
            ``Disabled``.
        keep_precision: Whether to add up the slices of float16 operands in float32, and round once,
            instead of rounding the sum of each slice. This changes values where slices are added
            up: for ``ReducingDim`` in the product itself, for the other modes in a gradient. If
            True, ``setPartialsType`` has no effect.

    Returns:
        The product, as ``torch.matmul`` returns it. Outside of a traced model this function calls
        ``torch.matmul``.

    Raises:
        UsageAssertionError: An argument has a wrong type.
        Error: While a model is compiled: the factor does not divide the dimension, or the operands
            are not floating-point tensors.
    """
    for name, value, kind in (
        ("lhs", lhs, torch.Tensor),
        ("rhs", rhs, torch.Tensor),
        ("mode", mode, MatMulSerializationMode),
        ("factor", factor, int),
        ("keep_precision", keep_precision, bool),
    ):
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise UsageAssertionError(
                f"serializedMatMul: {name} must be a {kind.__name__}, got {type(value).__name__}."
            )
    listener = op_listener.get()
    if listener is None or mode is MatMulSerializationMode.Disabled:
        return torch.matmul(lhs, rhs)
    lhs, rhs = listener.as_autocast("matmul", (lhs, rhs))
    if not _can_multiply(lhs, rhs):
        return torch.matmul(lhs, rhs)  # raises PyTorch's error
    a = lhs.unsqueeze(0) if lhs.dim() == 1 else lhs
    b = rhs.unsqueeze(1) if rhs.dim() == 1 else rhs
    _check_factor(mode, factor, {"rows": a.shape[-2], "depth": a.shape[-1], "columns": b.shape[-1]})
    dtype = _result_dtype(lhs, rhs)
    shape = torch.Size((*_batch(a, b), a.shape[-2], b.shape[-1]))
    matrices = _as_matrices(a, b)
    result: torch.Tensor = torch.ops.popsim.serialized_matmul(
        *matrices, _SLICES[mode], factor, keep_precision, dtype
    )
    result = result if result.shape == shape else result.view(shape)
    if lhs.dim() == 1:
        result = result.squeeze(-2)
    return result.squeeze(-1) if rhs.dim() == 1 else result


def _can_multiply(lhs: torch.Tensor, rhs: torch.Tensor) -> bool:
    if lhs.dim() == 0 or rhs.dim() == 0:
        return False
    if lhs.shape[-1] != rhs.shape[-2 if rhs.dim() > 1 else 0]:
        return False
    pairs = zip(reversed(lhs.shape[:-2]), reversed(rhs.shape[:-2]), strict=False)
    return all(one == other or 1 in (one, other) for one, other in pairs)


def _check_factor(mode: MatMulSerializationMode, factor: int, sizes: dict[str, int]) -> None:
    size = sizes[_SLICES[mode]]
    if factor < 1 or size % factor:
        raise Error(
            f"serializedMatMul: the factor {factor} must divide the dimension that {mode.name} "
            f"cuts, which has size {size}. Pass a divisor of {size}, or "
            "MatMulSerializationMode.Disabled."
        )


def _result_dtype(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.dtype:
    """Return the dtype of the result: that of the operands which are not parameters."""
    types = [returned_dtype(tensor.dtype) for tensor in (lhs, rhs)]
    for name, dtype in zip(("lhs", "rhs"), types, strict=True):
        if dtype not in _FLOATING:
            raise Error(
                f"serializedMatMul: {name} is {dtype}; operands must be float32 or float16. "
                "Convert it, or use torch.matmul."
            )
    pairs = zip((lhs, rhs), types, strict=True)
    others = {dtype for tensor, dtype in pairs if not isinstance(tensor, torch.nn.Parameter)}
    others = others or set(types)
    return others.pop() if len(others) == 1 else torch.float32


def _batch(a: torch.Tensor, b: torch.Tensor) -> torch.Size:
    return broadcast_shapes(a.shape[:-2], b.shape[:-2])


def _as_matrices(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the operands with one batch dimension, or without any.

    A batch of matrices times one matrix is computed as one tall matrix times that matrix: a slice
    of its rows has as many rows as the slices of all matrices together.
    """
    if b.dim() == 2:
        return a if a.dim() == 2 else a.reshape(-1, a.shape[-1]), b
    batch = _batch(a, b)
    if len(batch) == 1:
        return a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
    a = a.expand(*batch, *a.shape[-2:]).reshape(-1, *a.shape[-2:])
    return a, b.expand(*batch, *b.shape[-2:]).reshape(-1, *b.shape[-2:])
