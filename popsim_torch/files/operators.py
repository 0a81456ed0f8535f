"""The operators of PyTorch that a file may name, and how it may call them.

The ``aten`` op calls any operator of the process by its name, and a file may come from anyone. So a
program that is read only from a file may have the operators of this list and no others. All of them
compute only their results from their arguments: none reads or writes files, prints, or returns
uninitialized memory. All were tested with wrong numbers and shapes. If PyTorch does not refuse
these, ``operand_shapes.py`` and ``csrc/ops/aten/positions.cpp`` do. ``REFUSED`` has the operators
that models call, but no file may, with the reasons. tests/coverage fails if a model calls an
operator that is in neither list.

A file also cannot contain the code that ``poptorch.CPU`` calls. A ``custom`` op is not in the list,
even if the process has registered it: its kernel was written for the values of its own model, but a
file may pass any values.

A model that has one of these, or an operator that is not PyTorch's, is compiled from its code;
``loadExecutable`` compares the result with the file.
"""

from __future__ import annotations

from typing import Any

import torch

from popsim_torch.errors import Error
from popsim_torch.files.operand_shapes import SHAPES
from popsim_torch.ir import Graph, Op, TensorArgument, TensorListArgument, walk_all
from popsim_torch.lowering.rules.aten import MEMORY_FORMATS, SCALAR_TYPES, out_overload
from popsim_torch.private_torch.operators import OpOverload, schema_of

__all__ = ["OPERATORS", "REFUSED", "check_operators", "foreign_operators"]


def _names(text: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in text.split())


# One element of each operand gives one element of the result.
_ELEMENTWISE = _names("""
    __and__ __lshift__ __or__ __rshift__ __xor__ _conj _conj_copy _conj_physical _neg_view
    _neg_view_copy _prelu_kernel _prelu_kernel_backward abs acos acosh add addcdiv addcmul angle
    asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or
    bitwise_right_shift bitwise_xor bucketize ceil celu clamp clamp_max clamp_min complex
    conj_physical copysign cos cosh deg2rad digamma div elu elu_backward eq erf erfc erfinv exp exp2
    expm1 floor floor_divide fmax fmin fmod frac frexp gcd ge gelu gelu_backward gt hardshrink
    hardshrink_backward hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh
    hardtanh_backward heaviside hypot i0 igamma igammac isfinite isin isinf isnan isneginf isposinf
    lcm ldexp le leaky_relu leaky_relu_backward lerp lgamma log log10 log1p log2
    log_sigmoid_backward log_sigmoid_forward logaddexp logaddexp2 logical_and logical_not logical_or
    logical_xor logit logit_backward lt masked_fill maximum minimum mish mish_backward mul mvlgamma
    nan_to_num native_dropout_backward ne neg nextafter polar polygamma positive pow rad2deg
    reciprocal relu remainder round rrelu_with_noise_backward rsqrt rsub searchsorted sgn sigmoid
    sigmoid_backward sign signbit silu silu_backward sin sinc sinh softplus softplus_backward
    softshrink softshrink_backward special_airy_ai special_bessel_j0 special_bessel_j1
    special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t
    special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w
    special_entr special_erfcx special_hermite_polynomial_h special_hermite_polynomial_he
    special_i0e special_i1 special_i1e special_laguerre_polynomial_l special_legendre_polynomial_p
    special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1
    special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri
    special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w
    special_spherical_bessel_j0 special_xlog1py special_zeta sqrt square sub tan tanh tanh_backward
    threshold threshold_backward trunc where xlogy
""")

# Many elements give one element, or some of the elements, or their order.
_REDUCTIONS = _names("""
    all amax amin aminmax any argmax argmin argsort count_nonzero cummax cummin cumprod cumsum dist
    histc histogram kthvalue linalg_vector_norm logcumsumexp logsumexp max mean median min mode
    nanmedian nansum norm prod renorm sort std std_mean sum topk trace var var_mean
""")

# These move elements, or make them from numbers. Indices are checked when they are used.
_LAYOUTS = _names("""
    _chunk_cat _efficientzerotensor _to_copy _unsafe_index _unsafe_masked_index
    _unsafe_masked_index_put_accumulate arange as_strided_scatter block_diag cat channel_shuffle
    col2im constant_pad_nd copy diag_embed diagonal_backward diagonal_scatter eye fill flip gather
    im2col index index_add index_copy index_fill index_put index_reduce index_select linspace
    logspace masked_scatter masked_scatter_backward nonzero_static pixel_shuffle pixel_unshuffle put
    reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward
    reflection_pad3d reflection_pad3d_backward repeat replication_pad1d replication_pad1d_backward
    replication_pad2d replication_pad2d_backward replication_pad3d replication_pad3d_backward roll
    rot90 scatter scatter_add scatter_reduce select_backward select_scatter slice_backward
    slice_scatter stack take tril tril_indices triu triu_indices unfold_backward unsafe_split view
    view_copy zero
""")

# Layers of neural networks and their gradients.
_LAYERS = _names("""
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d
    _adaptive_avg_pool3d_backward _cdist_backward _cdist_forward _log_softmax
    _log_softmax_backward_data _pdist_backward _pdist_forward _softmax _softmax_backward_data
    _upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa
    _upsample_bilinear2d_aa_backward _upsample_nearest_exact1d _upsample_nearest_exact1d_backward
    _upsample_nearest_exact2d _upsample_nearest_exact2d_backward _upsample_nearest_exact3d
    _upsample_nearest_exact3d_backward adaptive_max_pool2d adaptive_max_pool2d_backward
    adaptive_max_pool3d adaptive_max_pool3d_backward avg_pool2d avg_pool2d_backward avg_pool3d
    avg_pool3d_backward embedding fractional_max_pool2d fractional_max_pool2d_backward
    fractional_max_pool3d glu glu_backward grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d
    grid_sampler_3d_backward max_pool2d_with_indices max_pool2d_with_indices_backward
    max_pool3d_with_indices max_pool3d_with_indices_backward max_unpool2d max_unpool3d
    multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_backward
    multilabel_margin_loss_forward native_batch_norm_backward nll_loss2d_backward nll_loss2d_forward
    nll_loss_backward nll_loss_forward soft_margin_loss soft_margin_loss_backward upsample_bicubic2d
    upsample_bicubic2d_backward upsample_bilinear2d upsample_bilinear2d_backward upsample_linear1d
    upsample_linear1d_backward upsample_nearest1d upsample_nearest1d_backward upsample_nearest2d
    upsample_nearest2d_backward upsample_nearest3d upsample_nearest3d_backward upsample_trilinear3d
    upsample_trilinear3d_backward
""")

# Products and decompositions of matrices, and Fourier transforms.
_MATRICES = _names("""
    _fft_c2c _fft_c2r _fft_r2c _linalg_det _linalg_eigh _linalg_slogdet
    _linalg_solve_ex _linalg_svd _trilinear addbmm addmm addmv addr baddbmm bmm cholesky
    cholesky_inverse cholesky_solve dot geqrf linalg_cholesky_ex linalg_cross linalg_eig
    linalg_eigvals linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex linalg_lu
    linalg_lu_factor_ex linalg_matrix_exp linalg_pinv linalg_qr linalg_solve_triangular mm mv ormqr
    triangular_solve vdot
""")

# These draw random numbers, from the generator of the device.
_RANDOM = _names("""
    bernoulli cauchy exponential geometric log_normal multinomial native_dropout normal
    normal_functional poisson
    randint randint_like randperm rrelu_with_noise_functional uniform
""")

# These fail for some values, and compute nothing.
_CHECKS = _names("_assert_async _linalg_check_errors")

OPERATORS = _ELEMENTWISE | _REDUCTIONS | _LAYOUTS | _LAYERS | _MATRICES | _RANDOM | _CHECKS
"""The operators that a file may name."""

_FOLLOWED = "wrong ones make it access memory outside of its tensors"
REFUSED = {
    f"aten::{name}": reason
    for reason, names in {
        f"numbers of rows and starts of bags: {_FOLLOWED}": (
            "_embedding_bag",
            "_embedding_bag_backward",
            "_embedding_bag_forward_only",
            "_embedding_bag_per_sample_weights_backward",
            "embedding_dense_backward",
            "embedding_renorm",
        ),
        f"pivots: {_FOLLOWED}": ("linalg_ldl_solve", "linalg_lu_solve", "lu_unpack"),
        f"lengths and offsets: {_FOLLOWED}": ("_segment_reduce_backward", "segment_reduce"),
        f"labels: {_FOLLOWED}": ("_ctc_loss", "_ctc_loss_backward"),
        "it returns memory as it was": ("resize_as",),
        "nobody has tested it with wrong sizes": (
            "_batch_norm_with_update_functional",
            "_histogramdd_bin_edges",
            "_histogramdd_from_bin_cts",
            "_histogramdd_from_bin_tensors",
            "batch_norm_backward",
            "convolution",
            "fractional_max_pool3d_backward",
            "native_group_norm",
            "native_group_norm_backward",
            "native_layer_norm",
            "native_layer_norm_backward",
        ),
        "some sizes are refused with a line of text only, and memory is returned as it was": (
            "linalg_lstsq",
        ),
    }.items()
    for name in names
}
"""The operators that models call but a file may not name, and why."""


def foreign_operators(graph: Graph) -> list[str]:
    """Return the operators of a graph that a file may not name, each once."""
    ops = [op for _, op in walk_all(graph)]
    found = (op.attributes.get("operator") for op in ops if op.kind == "aten")
    foreign = {str(name) for name in found if name not in OPERATORS}
    foreign |= {
        f"{op.attributes.get('domain')}::{op.attributes.get('name')}"
        for op in ops
        if op.kind == "custom"
    }
    if any(op.kind == "host_call" for op in ops):
        foreign.add("poptorch.CPU")
    return sorted(foreign)


def check_operators(graph: Graph) -> None:
    """Check that a graph only calls operators of the list, in the same form as lowering does.

    Raises:
        Error: The graph calls another operator.
        ValueError: The graph calls an operator in another form.
    """
    foreign = foreign_operators(graph)
    if foreign:
        raise Error(
            f"Its program calls {', '.join(foreign)}, which no file may do by itself. Compile "
            "the model from its class: wrap it, and call loadExecutable on the executor."
        )
    for owner, op in walk_all(graph):
        if op.kind == "aten":
            problem = _problem(op, owner)
            if problem is not None:
                name = f"{op.attributes['operator']}.{op.attributes.get('overload')}"
                raise ValueError(f"its program calls {name}, but {problem}")


def _problem(op: Op, graph: Graph) -> str | None:
    """Return the problem with a call of an operator of the list, or None."""
    target = _target(op)
    if target is None:
        return "that takes or returns other things than tensors and numbers, or changes them"
    out = out_overload(target)
    if "out" in op.attributes and (
        out is None or op.attributes["out"] != schema_of(out).overload_name
    ):
        return f"not into given memory by '{op.attributes['out']}'"
    given: Any = op.attributes.get("arguments")
    taken = schema_of(target).arguments
    if type(given) is not list or len(given) != len(taken):
        return f"it takes {len(taken)} arguments"
    for argument, value in zip(taken, given, strict=True):
        if not _fits(str(argument.real_type), argument.name, value):
            return f"its argument '{argument.name}' cannot be {value!r:.100}"
    for value in given:
        if isinstance(value, TensorArgument) and not 0 <= value.input < len(op.inputs):
            return f"it has no input {value.input}"
    shape_problem = SHAPES.get(schema_of(target).name)
    if shape_problem is None:
        return None
    return shape_problem([_meta(value, op, graph) for value in given])


def _target(op: Op) -> OpOverload | None:
    name, overload = op.attributes["operator"], op.attributes.get("overload")
    packet: Any = getattr(torch.ops.aten, str(name).removeprefix("aten::"))
    if type(overload) is not str or (overload or "default") not in packet.overloads():
        return None
    target: OpOverload = getattr(packet, overload or "default")
    schema = schema_of(target)
    kinds = {str(a.real_type) for a in schema.arguments}
    results = {str(r.real_type) for r in schema.returns}
    plain = not schema.is_mutable and kinds <= _KINDS and results <= _RESULTS
    return target if plain else None


_PLAIN = ("Tensor", "number", "int", "float", "bool", "str")
_OTHERS = ("ScalarType", "Layout", "Device", "MemoryFormat", "Generator", "SymInt")
_RESULTS = frozenset({"Tensor", "List[Tensor]"})
_KINDS = frozenset(
    text
    for kind in (*_PLAIN, *_OTHERS)
    for text in (
        *(kind, f"Optional[{kind}]", f"List[{kind}]", f"Optional[List[{kind}]]"),
        f"List[Optional[{kind}]]",
    )
)
_CHOICES: dict[str, frozenset[object]] = {
    "ScalarType": frozenset(SCALAR_TYPES.values()),
    "MemoryFormat": frozenset(MEMORY_FORMATS.values()),
    "Layout": frozenset({0}),
    "Device": frozenset({"cpu"}),
}


def _fits(kind: str, name: str, value: Any) -> bool:
    """Whether lowering could write an argument; checks what PyTorch might not check."""
    for part, choices in _CHOICES.items():
        if part in kind:
            return value is None or (type(value) in (int, str) and value in choices)
    if name in ("pin_memory", "non_blocking"):
        return value in (None, False)
    if "Generator" in kind:
        return value is None
    return "Tensor" in kind or not isinstance(value, (TensorArgument, TensorListArgument))


def _meta(value: Any, op: Op, graph: Graph) -> Any:
    """Return a tensor without data for an argument that is a tensor."""
    if not isinstance(value, TensorArgument):
        return value
    i = op.inputs[value.input]
    if not 0 <= i < len(graph.tensors):
        raise ValueError(f"its program has no tensor {i}")
    tensor = graph.tensors[i]
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
