"""Tensors without inputs: filled with one value, or with random numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.fx

from popsim_torch.dtypes import dtype_name
from popsim_torch.errors import Error
from popsim_torch.lowering.emit.builder import Builder, Place, Value
from popsim_torch.lowering.rules.aten import lower_aten
from popsim_torch.lowering.rules.rule import Family, Rule
from popsim_torch.private_torch.operators import OpOverload, schema_of

aten = torch.ops.aten

# The fill value of each operator, or position and name of the argument that has it.
_FILLS: dict[Any, float | tuple[int, str]] = {
    aten.empty.memory_format: 0,
    aten.empty_like.default: 0,
    aten.empty_permuted.default: 0,
    aten.empty_strided.default: 0,
    aten.full.default: (1, "fill_value"),
    aten.full_like.default: (1, "fill_value"),
    aten.new_empty.default: 0,
    aten.new_empty_strided.default: 0,
    aten.new_full.default: (2, "fill_value"),
    aten.new_ones.default: 1,
    aten.new_zeros.default: 0,
    aten.ones.default: 1,
    aten.ones_like.default: 1,
    aten.scalar_tensor.default: (0, "s"),
    aten.zeros.default: 0,
    aten.zeros_like.default: 0,
}

_shared: WeakValueDictionary[Any, torch.Tensor] = WeakValueDictionary()
"""The filled tensors of the constants that exist."""

_WITH_GENERATOR = {
    aten.randint.default: aten.randint.generator,
    aten.randint.low: aten.randint.low_generator,
    aten.randint_like.default: aten.randint_like.generator,
    aten.randint_like.low_dtype: aten.randint_like.low_generator_dtype,
    aten.randperm.default: aten.randperm.generator,
}


def _filled(fill: Any, builder: Builder, node: torch.fx.Node, _place: Place) -> Value:
    """Add a constant with the same value everywhere."""
    if isinstance(fill, tuple):
        position, name = fill
        fill = node.args[position] if len(node.args) > position else node.kwargs[name]
    value: torch.Tensor = node.meta["val"]
    return builder.constant(_full(tuple(value.shape), fill, value.dtype))


def _full(shape: tuple[int, ...], fill: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a filled tensor, for all constants that are equal to it.

    The dropouts of a large model would otherwise have hundreds of megabytes of equal constants.
    Nothing writes to constants.
    """
    # Zeros of both signs are equal.
    key = shape, repr(fill) if type(fill) in (float, complex) else fill, type(fill), dtype
    found = _shared.get(key)
    if found is None:
        found = _shared[key] = torch.full(shape, fill, dtype=dtype, device="cpu")
    return found


def _is_random(target: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in target.tags


def _draws_numbers(node: torch.fx.Node) -> bool:
    return not (node.target is aten.native_dropout.default and node.args[2] is False)


def is_random(node: torch.fx.Node) -> bool:
    """Return whether a node draws random numbers."""
    target = node.target
    return isinstance(target, OpOverload) and _is_random(target) and _draws_numbers(node)


def _random(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    """Add an op whose random numbers depend only on seed, op and micro-batch.

    Raises:
        Error: PyTorch's operator uses a hidden generator.
    """
    native = _native_random(builder, node, place)
    if native is not None:
        return native
    target: Any = node.target
    replacement = _WITH_GENERATOR.get(target, target)
    if not any(argument.name == "generator" for argument in schema_of(replacement).arguments):
        raise Error(
            f"Unsupported ops found in compiled model: [{schema_of(target).name}] in {place.shown} "
            "draws random numbers that cannot be reproduced. Use torch.rand, torch.randn or "
            "torch.bernoulli and compute from them."
        )
    stream = builder.stream_of[node]
    return lower_aten(builder, node, place, target=replacement, stream=stream)


def _native_random(builder: Builder, node: torch.fx.Node, place: Place) -> Value:
    val: Any = node.meta["val"]
    native = (torch.float32, torch.float16, torch.bool, torch.complex64)
    if not isinstance(val, torch.Tensor) or val.dtype not in native:
        return None
    attributes = _distribution(node)
    if attributes is None or val.numel() == 0:
        return None
    _check_parameters(attributes, place)
    if val.dtype.is_complex:
        return _complex_random(builder, node, attributes, place)
    inputs = []
    if node.target is aten.bernoulli.default:
        inputs = [builder.tensor(node.args[0])]
    out = builder.value(val.dtype, val.shape)
    attributes["shape"] = [int(size) for size in val.shape]
    attributes["stream"] = builder.stream_of[node]
    attributes["dtype"] = dtype_name(val.dtype)
    builder.op("random", inputs, [out], attributes, place=place, fixed_phase=True)
    return out


def _complex_random(
    builder: Builder, node: torch.fx.Node, attributes: dict[str, Any], place: Place
) -> Value:
    """Draw the parts of complex numbers; both together have the variance that is asked for."""
    if attributes["distribution"] == "bernoulli" or attributes.get("mean"):
        return None
    val: torch.Tensor = node.meta["val"]
    pairs = builder.value(val.dtype.to_real(), (*val.shape, 2))
    if "std" in attributes:
        attributes["std"] *= math.sqrt(0.5)
    attributes["shape"] = list(pairs.shape)
    attributes["stream"] = builder.stream_of[node]
    attributes["dtype"] = dtype_name(pairs.dtype)
    builder.op("random", [], [pairs], attributes, place=place, fixed_phase=True)
    return builder.graph.as_complex(pairs)


def _distribution(node: torch.fx.Node) -> dict[str, Any] | None:
    target, args = node.target, node.args
    kwargs = node.kwargs

    def number(position: int, name: str, default: float) -> float:
        value: Any = args[position] if len(args) > position else kwargs.get(name, default)
        return float(value)

    if target is aten.bernoulli.default:
        return {"distribution": "bernoulli"}
    if target is aten.bernoulli.p:
        return {"distribution": "bernoulli", "p": number(1, "p", 0.5)}
    if target in (aten.rand.default, aten.rand_like.default):
        return {"distribution": "uniform", "from": 0.0, "to": 1.0}
    if target is aten.uniform.default:
        low, high = number(1, "from", 0.0), number(2, "to", 1.0)
        return {"distribution": "uniform", "from": low, "to": high}
    if target in (aten.randn.default, aten.randn_like.default):
        return {"distribution": "normal", "mean": 0.0, "std": 1.0}
    if target is aten.normal_functional.default:
        mean, std = number(1, "mean", 0.0), number(2, "std", 1.0)
        if math.isfinite(mean) and math.isfinite(std):
            return {"distribution": "normal", "mean": mean, "std": std}
    return None


def _check_parameters(attributes: Mapping[str, Any], place: Place) -> None:
    """Refuse parameters that are invalid for the user's distribution, also NaN."""
    problem = ""
    if "p" in attributes and not 0.0 <= attributes["p"] <= 1.0:
        problem = f"p is {attributes['p']}, it must be in [0, 1]"
    elif "from" in attributes and not attributes["from"] <= attributes["to"]:
        problem = f"from is {attributes['from']}, it must not be above to = {attributes['to']}"
    elif "std" in attributes and not attributes["std"] >= 0.0:
        problem = f"std is {attributes['std']}, it must not be negative"
    if problem:
        raise Error(f"Random numbers {place.shown}: {problem}.")


RULES = {target: Rule(functools.partial(_filled, fill)) for target, fill in _FILLS.items()}
RANDOM = Family(_is_random, Rule(_random, _draws_numbers))
