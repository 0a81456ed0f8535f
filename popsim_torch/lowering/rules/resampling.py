"""Interpolation: sequences, images and volumes of another size."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.fx

from popsim_torch.ir import Attribute
from popsim_torch.lowering.emit.builder import Builder, Place, Value
from popsim_torch.lowering.rules.rule import FLOATING, Rule, all_filled, operands
from popsim_torch.private_torch.operators import schema_of

aten = torch.ops.aten


def _arguments(node: torch.fx.Node) -> dict[str, Any]:
    """Return the arguments of a node by their names; those that are left out are None."""
    target: Any = node.target
    names = [argument.name for argument in schema_of(target).arguments]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return {name: given.get(name) for name in names}


def _lower(
    mode: str, antialias: bool, builder: Builder, node: torch.fx.Node, place: Place
) -> Value:
    arguments = _arguments(node)
    value = node.meta["val"]
    scales = [s for name, s in arguments.items() if name.startswith("scales")]
    attributes: dict[str, Attribute] = {
        "scales": [float(scale or 0.0) for scale in scales],
        "mode": mode,
        "align_corners": bool(arguments.get("align_corners")),
        "antialias": antialias,
    }
    size = [int(length) for length in value.shape[2:]]
    is_gradient = "input_size" in arguments
    source = builder.tensor(node.args[0])
    out = builder.value(value.dtype, value.shape)
    kind = "resample_grad" if is_gradient else "resample"
    attributes["input_size" if is_gradient else "size"] = size
    builder.op(kind, [source], [out], attributes, place=place)
    return out


def _is_supported(node: torch.fx.Node) -> bool:
    value = node.meta["val"]
    return value.numel() > 0 and all_filled([*operands(node), value], FLOATING)


def _rule(mode: str, *, antialias: bool = False) -> Rule:
    return Rule(functools.partial(_lower, mode, antialias), _is_supported)


_NEAREST = _rule("nearest")
_EXACT = _rule("nearest_exact")
_LINEAR = _rule("linear")
_CUBIC = _rule("cubic")
_SMOOTH_LINEAR = _rule("linear", antialias=True)
_SMOOTH_CUBIC = _rule("cubic", antialias=True)

RULES: dict[Any, Rule] = {
    aten._upsample_bicubic2d_aa.default: _SMOOTH_CUBIC,
    aten._upsample_bicubic2d_aa_backward.default: _SMOOTH_CUBIC,
    aten._upsample_bilinear2d_aa.default: _SMOOTH_LINEAR,
    aten._upsample_bilinear2d_aa_backward.default: _SMOOTH_LINEAR,
    aten._upsample_nearest_exact1d.default: _EXACT,
    aten._upsample_nearest_exact1d_backward.default: _EXACT,
    aten._upsample_nearest_exact2d.default: _EXACT,
    aten._upsample_nearest_exact2d_backward.default: _EXACT,
    aten._upsample_nearest_exact3d.default: _EXACT,
    aten._upsample_nearest_exact3d_backward.default: _EXACT,
    aten.upsample_bicubic2d.default: _CUBIC,
    aten.upsample_bicubic2d_backward.default: _CUBIC,
    aten.upsample_bilinear2d.default: _LINEAR,
    aten.upsample_bilinear2d_backward.default: _LINEAR,
    aten.upsample_linear1d.default: _LINEAR,
    aten.upsample_linear1d_backward.default: _LINEAR,
    aten.upsample_nearest1d.default: _NEAREST,
    aten.upsample_nearest1d_backward.default: _NEAREST,
    aten.upsample_nearest2d.default: _NEAREST,
    aten.upsample_nearest2d_backward.default: _NEAREST,
    aten.upsample_nearest3d.default: _NEAREST,
    aten.upsample_nearest3d_backward.default: _NEAREST,
    aten.upsample_trilinear3d.default: _LINEAR,
    aten.upsample_trilinear3d_backward.default: _LINEAR,
}
