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
    """Return ``lhs @ rhs``, computed in slices one after another, which takes less memory.

    What a product needs besides its operands is as large as a slice: operands converted to the
    type of the sums, and the result before it is rounded. Its gradients are computed in slices,
    too. Values are those of ``torch.matmul`` but for the rounding of sums.

    Args:
        lhs: As for ``torch.matmul``: a vector, a matrix, or matrices with leading batch dimensions;
            floating point.
        rhs: The same. If one operand is a parameter, it is read in the type of the other one; of
            two other operands of different type the result is float32.
        mode: What is cut: ``InputChannels`` the rows of ``lhs``, ``ReducingDim`` the dimension that
            both share, ``OutputChannels`` the columns of ``rhs``; ``Disabled`` nothing.
        factor: How many slices (count): divides the dimension that is cut. Not looked at with
            ``Disabled``.
        keep_precision: Add up the slices of float16 operands in float32, and round once, instead of
            rounding the sum of each slice. Matters where slices are added up: for ``ReducingDim``
            in the product itself, for the others in a gradient. ``setPartialsType`` has no effect
            then.

    Returns:
        As ``torch.matmul``. Outside of a traced model it is ``torch.matmul``.

    Raises:
        UsageAssertionError: An argument is of another type.
        Error: While a model is compiled: the factor does not divide the dimension, or the operands
            are no floating point numbers.
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
    if op_listener.get() is None or mode is MatMulSerializationMode.Disabled:
        return torch.matmul(lhs, rhs)
    if not _can_multiply(lhs, rhs):
        return torch.matmul(lhs, rhs)  # raises what PyTorch raises
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
    """Return the type of the result: that of the operands which are no parameters."""
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
    """Return the operands with one batch dimension, or none.

    A batch of matrices times one matrix is one tall matrix times that matrix: slices of its rows
    are as many rows as the slices of all matrices together.
    """
    if b.dim() == 2:
        return a if a.dim() == 2 else a.reshape(-1, a.shape[-1]), b
    batch = _batch(a, b)
    if len(batch) == 1:
        return a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
    a = a.expand(*batch, *a.shape[-2:]).reshape(-1, *a.shape[-2:])
    return a, b.expand(*batch, *b.shape[-2:]).reshape(-1, *b.shape[-2:])
