"""Finds out from the code of a class whether forward uses the former value of an attribute."""

from __future__ import annotations

import dis
import inspect
import itertools
import types
from collections import defaultdict
from collections.abc import Iterator

from torch import nn

__all__ = ["reads_entries", "reads_former_value"]

# Methods of lists and dicts whose calls do not use what is in them.
_WRITES = frozenset({"append", "extend", "insert", "update"})
_LOADS = ("LOAD_ATTR", "LOAD_METHOD")


def reads_former_value(module: nn.Module, name: str) -> bool:
    """Return whether the code of a module's class looks at an attribute before it assigns it.

    Args:
        module: The module.
        name: An attribute that forward has assigned.
    """
    codes = list(_codes(type(module)))
    if any(_tests(code, name) for code in codes):
        return True
    accesses = [_accesses(code, name) for code in codes]
    assigning = [one for one in accesses if "STORE_ATTR" in one]
    if not assigning:  # the forward of another module assigns it
        return any(accesses)
    return any(one[0] in _LOADS for one in assigning)


def reads_entries(module: nn.Module, name: str) -> bool:
    """Return whether the code of a module's class uses the entries of a list or dict.

    Args:
        module: The module.
        name: An attribute that is a list or dict, to which forward has added entries.
    """
    reads = False
    for code in _codes(type(module)):
        instructions = list(dis.get_instructions(code))
        for at, one in enumerate(instructions):
            if one.opname not in _LOADS or one.argval != name:
                continue
            following = instructions[at + 1 : at + 3]
            method = following[0].argval if following[0].opname in _LOADS else None
            if method == "clear":
                return False
            is_write = method in _WRITES or following[-1].opname == "STORE_SUBSCR"
            reads = reads or not is_write
    return reads


def _tests(code: types.CodeType, name: str) -> bool:
    """Return whether code asks whether an attribute is there, or is None."""
    if name in code.co_consts and {"hasattr", "getattr"} & set(code.co_names):
        return True
    instructions = list(dis.get_instructions(code))
    return any(
        one.opname in _LOADS
        and one.argval == name
        and (following.opname.endswith(("_NONE", "_NOT_NONE")) or _is_none(following))
        for one, following in itertools.pairwise(instructions)
    )


def _is_none(instruction: dis.Instruction) -> bool:
    return instruction.opname == "LOAD_CONST" and instruction.argval is None


def _accesses(code: types.CodeType, name: str) -> list[str]:
    """Return the names of the instructions that load or assign an attribute, in their order."""
    kinds = (*_LOADS, "STORE_ATTR")
    return [
        one.opname
        for one in dis.get_instructions(code)
        if one.opname in kinds and one.argval == name
    ]


def _codes(kind: type) -> Iterator[types.CodeType]:
    """Yield the code of forward and of the methods that it uses, without PyTorch's."""
    methods: defaultdict[str, list[types.CodeType]] = defaultdict(list)
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        for name, member in vars(base).items():
            function = inspect.unwrap(getattr(member, "fget", member))
            if isinstance(function, types.FunctionType):
                methods[name] += _with_inner(function.__code__)
    todo, seen = ["forward", "__call__"], set[str]()
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            yield from methods[name]
            todo += [used for code in methods[name] for used in code.co_names]


def _with_inner(code: types.CodeType) -> list[types.CodeType]:
    """Return the code of a function, and of the functions in it."""
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return [code, *(found for one in inner for found in _with_inner(one))]
