"""What autocast does with an operator: PyTorch's lists, for its CPU and its CUDA devices.

Which operators are in the lists is asked from PyTorch itself. This file says which of them run in
the lower precision, and which are promoted; all others run in float32.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from popsim_torch.errors import Error
from popsim_torch.private_torch.autocasts import listed_operators
from popsim_torch.private_torch.operators import schema_of
from popsim_torch.private_torch.trees import tree_leaves, tree_map

__all__ = ["Policy", "cast_arguments", "is_cast", "policies_of", "refused", "with_dtype"]


class Policy(enum.Enum):
    """What happens to the floating-point arguments of an operator."""

    LOWER = "lower"
    """They are cast to the dtype of the region."""
    FLOAT32 = "float32"
    """They are cast to float32."""
    FLOAT32_RESULT = "float32 result"
    """The argument ``dtype`` becomes float32 unless it is given."""
    PROMOTE = "promote"
    """They are cast to the widest dtype among them."""
    REFUSED = "refused"
    """The operator raises an error."""


_LOWER = frozenset(
    {
        *("_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "convolution"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("cudnn_convolution", "cudnn_convolution_transpose"),
        *("addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "einsum"),
        *("linalg_multi_dot", "linalg_vecdot", "linear", "matmul", "mm", "mv", "prelu"),
        *("_addmm_activation", "_native_multi_head_attention", "mkldnn_rnn_layer"),
        *("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell"),
        *("rnn_tanh_cell", "rnn_relu_cell"),
        *("_scaled_dot_product_flash_attention", "scaled_dot_product_attention"),
    }
)
_PROMOTED = {
    "cpu": frozenset({"cat", "index_copy", "stack"}),
    "cuda": frozenset(
        {
            *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler"),
            *("index_put", "tensordot", "scatter_add"),
        }
    ),
}
# On the CPU, `prod` is cast like other operators.
_FLOAT32_RESULT = {
    "cpu": frozenset[str](),
    "cuda": frozenset(
        {
            *("prod", "softmax", "log_softmax", "cumprod", "cumsum", "sum", "norm"),
            *("linalg_vector_norm", "linalg_matrix_norm"),
        }
    ),
}
_REFUSED = {"cpu": frozenset[str](), "cuda": frozenset({"binary_cross_entropy"})}


@functools.cache
def policies_of(device_type: str) -> Mapping[str, Policy]:
    """Return the policy of each operator that autocast handles, by name and overload.

    Args:
        device_type: The device type of the region; this device has the list of CUDA.
    """
    lists = "cpu" if device_type == "cpu" else "cuda"
    result = {}
    for name in listed_operators(lists):
        packet = name.partition(".")[0]
        policy = Policy.FLOAT32
        if packet in _LOWER:
            policy = Policy.LOWER
        elif packet in _PROMOTED[lists]:
            policy = Policy.PROMOTE
        elif packet in _FLOAT32_RESULT[lists]:
            policy = Policy.FLOAT32_RESULT
        elif packet in _REFUSED[lists] and device_type != "ipu":
            policy = Policy.REFUSED
        result[name] = policy
    return result


def is_cast(value: Any) -> bool:
    """Return whether autocast may cast a value: a tensor of floating-point numbers."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def cast_arguments(
    policy: Policy,
    lower: torch.dtype,
    cast: Callable[[torch.Tensor, torch.dtype], torch.Tensor],
    arguments: Any,
) -> Any:
    """Return the arguments of an operator, cast as its policy says.

    Args:
        policy: The policy; not one that only changes the argument ``dtype``.
        lower: The dtype of the region.
        cast: Casts a tensor to a dtype.
        arguments: The arguments, in any structure.
    """
    target = lower if policy == Policy.LOWER else torch.float32
    if policy == Policy.PROMOTE:
        dtypes = (value.dtype for value in tree_leaves(arguments) if is_cast(value))
        target = functools.reduce(torch.promote_types, dtypes, lower)
    return tree_map(lambda value: cast(value, target) if is_cast(value) else value, arguments)


def with_dtype(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments with ``dtype=torch.float32``, unless a dtype is given."""
    position = [one.name for one in schema_of(operator).arguments].index("dtype")
    given = kwargs.get("dtype", args[position] if position < len(args) else None)
    if given is not None or not args or not is_cast(args[0]):
        return dict(kwargs)
    return {**kwargs, "dtype": torch.float32}


def refused(name: str) -> Error:
    """Return the error for an operator that is unsafe in the lower precision."""
    return Error(
        f"torch.nn.functional.{name} and torch.nn.BCELoss are unsafe to autocast. Many models use "
        "a sigmoid layer right before the binary cross entropy layer: combine the two layers "
        f"using torch.nn.functional.{name}_with_logits or torch.nn.BCEWithLogitsLoss, which are "
        "safe to autocast."
    )
