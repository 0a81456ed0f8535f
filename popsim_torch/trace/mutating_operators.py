"""Replaces a user's operator that changes an argument by one that does not.

The replacement runs the operator on copies, and ``aten.copy_`` writes the results to the arguments.
Mutation by ``aten.copy_`` can be removed from a trace; mutation by an unknown operator cannot.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from popsim_torch.private_torch.operators import OpOverload, OpOverloadPacket, schema_of
from popsim_torch.typed_torch import new_library

__all__ = ["functional_call", "is_functional_form"]

_SUFFIX = "_functional"
_OWN = ("aten", "prims", "popsim")
# Number of definitions of an operator with that name: each has its own replacement.
_defined: Counter[str] = Counter()
# The operators exist as long as these libraries.
_libraries: list[Any] = []


def functional_call(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """Return a replacement of an operator that changes arguments; None for other functions.

    Args:
        func: A function of torch.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    if isinstance(func, OpOverloadPacket) and func.overloads() == ["default"]:  # type: ignore[no-untyped-call]
        func = func.default
    if not isinstance(func, OpOverload) or func.namespace in _OWN:
        return None
    if not schema_of(func).is_mutable or not _is_plain(schema_of(func)):
        return None
    return functools.partial(_call, func, args, kwargs)


def is_functional_form(operator: OpOverload) -> bool:
    """Return whether an operator is the replacement of one that changes arguments."""
    return re.search(rf"{_SUFFIX}\d*$", operator.namespace) is not None


def _is_plain(schema: Any) -> bool:
    """Return whether an operator changes only single tensors, and returns only new tensors."""
    changed = [a for a in schema.arguments if a.alias_info is not None]
    return all(str(a.type) == "Tensor" and a.alias_info.is_write for a in changed) and all(
        str(r.type) == "Tensor" and r.alias_info is None for r in schema.returns
    )


def _changed(schema: Any) -> list[tuple[int, str]]:
    """Return position and name of each argument that is changed."""
    return [(i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None]


def _call(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    schema = schema_of(operator)
    # Such operators have no gradient; a tensor that they change keeps its old gradient.
    with torch.no_grad():
        found = _functional_form(operator)(*args, **kwargs)
        results = [found] if isinstance(found, torch.Tensor) else list(found)
        split = len(schema.returns)
        for (i, name), value in zip(_changed(schema), results[split:], strict=True):
            target = args[i] if i < len(args) else kwargs[name]
            target.copy_(value)
    returned = tuple(results[:split])
    return returned if split > 1 else next(iter(returned), None)


@functools.cache
def _functional_form(operator: OpOverload) -> OpOverload:
    """Define the operator that returns its results, then the changed arguments."""
    schema = schema_of(operator)
    changed = _changed(schema)

    def compute(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        copies = []
        for i, name in changed:
            if i < len(given):
                given[i] = given[i].clone()
                copies.append(given[i])
            else:
                kwargs[name] = kwargs[name].clone()
                copies.append(kwargs[name])
        found = operator(*given, **kwargs)
        results = [found] if isinstance(found, torch.Tensor) else list(found or ())
        everything = (*results, *copies)
        return everything if len(everything) > 1 else everything[0]

    _defined[str(operator)] += 1
    number = _defined[str(operator)]
    namespace = f"{operator.namespace}{_SUFFIX}{number if number > 1 else ''}"
    name = schema.name.partition("::")[2]
    arguments = str(schema).partition("(")[2].rpartition(") -> ")[0]
    arguments = re.sub(r"Tensor\(\w+!\)", "Tensor", arguments)
    returns = ", ".join(["Tensor"] * (len(schema.returns) + len(changed)))
    library = new_library(namespace, "FRAGMENT")
    library.define(f"{name}({arguments}) -> ({returns})")
    library.impl(name, compute, "CPU")
    torch.library.register_fake(f"{namespace}::{name}", compute, lib=library)
    _libraries.append(library)
    form: OpOverload = getattr(getattr(torch.ops, namespace), name).default
    return form
