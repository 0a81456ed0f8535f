"""Finds out from code whether forward uses the former value of an attribute or a global name."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import sys
import types
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch import nn

from popsim_torch.trace.host_reads import LIBRARIES

__all__ = ["FormerValues", "Kind", "former_values_of", "mentions", "methods_of"]

# Methods of lists, dicts and sets whose calls do not use what is in them.
_WRITES = frozenset({"add", "append", "appendleft", "extend", "insert", "update"})
_LOADS = ("LOAD_ATTR", "LOAD_METHOD")
_WRAPPERS: tuple[Any, ...] = (
    types.FunctionType,
    staticmethod,
    classmethod,
    type(functools.lru_cache(len)),
)
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_REPLACES = (["STORE_SUBSCR"], ["DELETE_SUBSCR"])
_GLOBALS = {"LOAD_GLOBAL": "LOAD_ATTR", "STORE_GLOBAL": "STORE_ATTR"}

Kind = type | types.ModuleType
"""The class of an object with attributes, or a file with global names."""

# Special methods that forward does not call.
_NOT_CALLED = frozenset(
    f"__{name}__"
    for name in (
        *("init", "post_init", "new", "del", "repr", "str", "format", "dir"),
        *("reduce", "reduce_ex", "getstate", "setstate", "copy", "deepcopy"),
    )
)


class FormerValues:
    """Looks for uses of former values in the methods that forward may call.

    Args:
        kinds: The classes of the modules, and of other objects that they have, and their files.
    """

    def __init__(self, kinds: Iterable[Kind]) -> None:
        self._methods = {kind: methods_of(kind) for kind in kinds}
        all_methods: defaultdict[str, list[types.CodeType]] = defaultdict(list)
        for methods in self._methods.values():
            for name, codes in methods.items():
                all_methods[name] += codes
        special = {name for name in all_methods if name.startswith("__")} - _NOT_CALLED
        self._called, todo = set[str](), ["forward", *special]
        while todo:
            name = todo.pop()
            if name in all_methods and name not in self._called:
                self._called.add(name)
                todo += [used for code in all_methods[name] for used in code.co_names]

    def are_read(self, kind: Kind, name: str, *, anywhere: bool = False) -> bool:
        """Return whether code looks at an attribute before it assigns it.

        Args:
            kind: The class of the object that has the attribute, or the file of a global name.
            name: The attribute or global name, which forward has assigned.
            anywhere: Whether code that does not assign it counts, too.
        """
        of_file = isinstance(kind, types.ModuleType)
        codes = self._codes(kind)
        accesses = [_accesses(code, name, of_file) for code in codes]
        assigning = [one for one in accesses if "STORE_ATTR" in one]
        # (one that its own class assigns later is no attribute that only a parent sets)
        for one in self._methods if not assigning else [kind]:
            for code in self._methods[one].get("forward", ())[:1]:
                if _assigns_at_once(code, name, of_itself=one is kind):
                    return False
        if any(_tests(code, name, of_file) for code in codes):
            return True
        if anywhere and any(one[0] in _LOADS for one in accesses if one):
            return True
        if assigning:
            return any(one[0] in _LOADS for one in assigning)
        # (the code of another class assigns it)
        return any(accesses) or any(
            _tests(code, name, of_file) or found[0] in _LOADS
            for code in self._all_codes()
            if "STORE_ATTR" in (found := _accesses(code, name, of_file))
        )

    def later_value_is_read(self, kind: type, name: str) -> bool:
        """Return whether code looks at an attribute that is set between two calls of forward.

        Args:
            kind: The class of the object that has the attribute.
            name: The attribute.
        """
        if not any(mentions(code, name) for code in self._all_codes()):
            return False
        is_assigned = any("STORE_ATTR" in _accesses(code, name) for code in self._codes(kind))
        return not is_assigned or self.are_read(kind, name)

    def entries_are_read(self, kind: Kind, name: str, *, new_keys: bool = False) -> bool:
        """Return whether code uses the entries of a list or dict that a former call has added.

        Args:
            kind: The class of the object that has it as an attribute, or the file that has it.
            name: The attribute or global name; forward has added entries.
            new_keys: Whether forward has given a dict only keys that it did not have: reading one
                by its key before it was there would have been an error.
        """
        of_file = isinstance(kind, types.ModuleType)
        codes = self._codes(kind)
        is_of_module = isinstance(kind, type) and issubclass(kind, nn.Module)
        if not is_of_module or not any(_accesses(code, name) for code in codes):
            codes = self._all_codes()
        reads = False
        for code in codes:
            instructions = list(dis.get_instructions(code))
            for at, one in enumerate(instructions):
                if _access(one, of_file) not in _LOADS or one.argval != name:
                    continue
                following = instructions[at + 1 : at + 3]
                method = following[0].argval if following[0].opname in _LOADS else None
                if method == "clear" or _replaces_all(instructions[at + 1 : at + 5]):
                    return False
                is_write = method in _WRITES or following[-1].opname == "STORE_SUBSCR"
                is_write |= new_keys and _is_subscript(following[-1])
                reads = reads or not is_write
        return reads

    def _codes(self, kind: Kind) -> list[types.CodeType]:
        methods = self._methods[kind]
        return [code for name in methods if name in self._called for code in methods[name]]

    def _all_codes(self) -> list[types.CodeType]:
        return [code for kind in self._methods for code in self._codes(kind)]


def former_values_of(module: nn.Module) -> FormerValues:
    """Return the uses of values in the classes of a model, and in the files with these classes."""
    kinds = dict.fromkeys(map(type, module.modules()))
    names = dict.fromkeys(kind.__module__ for kind in kinds)
    files = [sys.modules.get(name) for name in names if name.partition(".")[0] not in LIBRARIES]
    return FormerValues([*kinds, *(one for one in files if isinstance(one, types.ModuleType))])


def _tests(code: types.CodeType, name: str, of_file: bool) -> bool:
    """Return whether code asks whether an attribute is there, or is None."""
    if name in code.co_consts and {"hasattr", "getattr"} & set(code.co_names):
        return True
    instructions = list(dis.get_instructions(code))
    return any(
        _access(one, of_file) in _LOADS
        and one.argval == name
        and (following.opname.endswith(("_NONE", "_NOT_NONE")) or _is_none(following))
        for one, following in itertools.pairwise(instructions)
    )


def mentions(code: types.CodeType, name: str) -> bool:
    """Return whether code loads an attribute, or may ask for it by its name.

    Args:
        code: The code of a function.
        name: The attribute.
    """
    return name in code.co_consts or any(one in _LOADS for one in _accesses(code, name))


def _assigns_at_once(code: types.CodeType, name: str, *, of_itself: bool) -> bool:
    """Return whether a method assigns an attribute before anything else may look at it.

    Before it are no jumps, and the object itself is only used to assign attributes.

    Args:
        code: The code of the method.
        name: The attribute.
        of_itself: Whether it is one of the object itself; otherwise it is one of its parts.
    """
    itself = code.co_varnames[:1]
    instructions = list(dis.get_instructions(code))
    for at, one in enumerate(instructions):
        if one.opname == "STORE_ATTR" and one.argval == name:
            return (instructions[at - 1].opname != "LOAD_ATTR") == of_itself
        # (some load two names, or assign one and load another)
        loaded = one.argval if isinstance(one.argval, tuple) else (one.argval,)
        if "LOAD_FAST" in one.opname and set(itself) & set(loaded):
            rest = instructions[at + 1 :]
            target = next(it for it in rest if it.opname != "LOAD_ATTR")
            if loaded[-1] not in itself or target.opname != "STORE_ATTR":
                return False
        elif one.opcode in _JUMPS or one.opname == "LOAD_DEREF" or one.argval in ("super", name):
            return False
    return False


def _replaces_all(instructions: list[dis.Instruction]) -> bool:
    """Return whether code assigns or deletes ``[:]`` of what it has loaded."""
    names = [one.opname for one in instructions]
    values = [one.argval for one in instructions]
    if names[1:2] in _REPLACES:
        return bool(values[0] == slice(None))
    if names[:2] != ["LOAD_CONST"] * 2 or values[:2] != [None] * 2:
        return False
    return names[2:3] == ["STORE_SLICE"] or (
        names[2:3] == ["BUILD_SLICE"] and names[3:4] in _REPLACES
    )


def _is_subscript(instruction: dis.Instruction) -> bool:
    return instruction.opname.startswith("BINARY_SUBSCR") or instruction.argrepr == "[]"


def _is_none(instruction: dis.Instruction) -> bool:
    return instruction.opname == "LOAD_CONST" and instruction.argval is None


def _accesses(code: types.CodeType, name: str, of_file: bool = False) -> list[str]:
    """Return the instructions that load or assign an attribute, or a global name, in order."""
    kinds = (*_LOADS, "STORE_ATTR")
    return [
        _access(one, of_file)
        for one in dis.get_instructions(code)
        if one.argval == name and _access(one, of_file) in kinds
    ]


def _access(instruction: dis.Instruction, of_file: bool) -> str:
    """Return an instruction's name; that of global names is the one of attributes for a file."""
    return _GLOBALS.get(instruction.opname, "") if of_file else instruction.opname


def methods_of(kind: Kind) -> dict[str, list[types.CodeType]]:
    """Return the code of a file's functions, or of a class's methods without PyTorch's, by name."""
    methods: defaultdict[str, list[types.CodeType]] = defaultdict(list)
    for base in [kind] if isinstance(kind, types.ModuleType) else kind.__mro__:
        if isinstance(base, type) and base.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        for name, member in list(vars(base).items()):
            if isinstance(member, property):
                member = member.fget
            elif isinstance(member, functools.cached_property):
                member = member.func
            # (of other objects unwrap() may call the user's code)
            function = inspect.unwrap(member) if isinstance(member, _WRAPPERS) else None
            if isinstance(function, types.FunctionType):
                methods[name] += _with_inner(function.__code__)
    return methods


def _with_inner(code: types.CodeType) -> list[types.CodeType]:
    """Return the code of a function, and of the functions in it."""
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return [code, *(found for one in inner for found in _with_inner(one))]
