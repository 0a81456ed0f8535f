"""The base classes of ``Options`` and its groups: typed settings that can be frozen.

Package private.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from enum import IntEnum
from pprint import saferepr
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, overload

from popsim_torch.errors import (
    UsageAssertionError,
    UsageAttributeError,
    UsageValueError,
    closest_names,
)
from popsim_torch.tables import Described

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

REFUSALS = "_refusals"
"""The attribute with the objects that would not see a change; copies do not have it."""

_ABSENT: Any = object()
_OBJECT_ID = re.compile(r" (?:at 0x[0-9A-Fa-f]+|with id=\d+)")


class Setting(Generic[T]):
    """One stored value of a group, declared in the class body under its name.

    Args:
        default: The value in a new group; it is copied.
        kind: The class that values must have; None for the class of ``default``.
        enum: The integer enum whose values are stored, if any.
        setter: The mirrored method that sets it, for messages.
        is_key: Whether ``repr``, ``toDict`` and ``exists`` include it; other settings are hidden
            from programs.
    """

    def __init__(
        self,
        default: T,
        *,
        kind: type | None = None,
        enum: type[IntEnum] | None = None,
        setter: str = "",
        is_key: bool = True,
    ) -> None:
        self.default = default
        self.kind = kind or type(default)
        self.enum = enum
        self.setter = setter
        self.is_key = is_key
        self.name = ""

    @classmethod
    def absent(cls, kind: type[T], setter: str) -> Setting[T]:
        """Return a setting without a default: it exists once it has been set.

        Args:
            kind: The class that values must have.
            setter: The mirrored method that sets it, for messages.
        """
        return cls(_ABSENT, kind=kind, setter=setter)

    @property
    def has_default(self) -> bool:
        """Whether a new group holds a value."""
        return self.default is not _ABSENT

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.__doc__ = self._describe()

    def _describe(self) -> str:
        """Return the docstring that the reference shows of the value."""
        source = f"The value that ``{self.setter}`` sets" if self.setter else "A stored value"
        if not self.has_default:
            return f"{source}; it does not exist before that."
        if self.enum is None:
            return f"{source}; ``{self.default!r}`` by default."
        default: Any = self.default
        kind, member = self.enum.__name__, self.enum(default).name
        return f"{source}, a :class:`~popsim_torch.{kind}`; ``{member}`` by default."

    @overload
    def __get__(self, group: None, owner: type) -> Setting[T]: ...
    @overload
    def __get__(self, group: OptionsGroup, owner: type) -> T: ...
    def __get__(self, group: OptionsGroup | None, owner: type) -> Setting[T] | T:
        return self if group is None else group(self.name)

    def __set__(self, group: OptionsGroup, value: T) -> None:
        group.set(**{self.name: value})

    def check(self, path: str, value: object) -> object:
        """Check a value, and return the value to store.

        Args:
            path: The group, for messages.
            value: The user's value.

        Raises:
            UsageAssertionError: The value has the wrong class.
            UsageValueError: The value is not in the enum.
        """
        if not isinstance(value, self.kind):
            raise UsageAssertionError(
                f"{path}.{self.setter or self.name}({value!r}): got a {type(value).__name__}, "
                f"need a value of type {self.kind.__name__}."
            )
        if self.enum is not None and value not in list(self.enum):
            members = ", ".join(f"{self.enum.__name__}.{member.name}" for member in self.enum)
            raise UsageValueError(f"{path}.{self.setter or self.name}({value!r}): use {members}.")
        # Accept a boolean as a number, and a member of an enum as an int.
        counts = issubclass(self.kind, int) and self.kind is not bool
        return self.kind(value) if counts else value


class FreezableOptions(Described):
    """An options object or one of its groups, which can be changed until it is frozen."""

    _path: ClassVar[str] = "Options"
    _is_frozen: bool

    def __init__(self) -> None:
        self.__dict__["_is_frozen"] = False

    def freeze(self) -> Self:
        """Refuse all later changes, in this object and in its groups.

        Wrapping a model or building a ``DataLoader`` freezes the options that they get. A clone can
        be changed again.

        Returns:
            The object itself.
        """
        for part in self._parts().values():
            part.freeze()
        self.__dict__["_is_frozen"] = True
        return self

    def checkIsFrozen(self) -> None:
        """Raise an error if the object is frozen.

        Raises:
            UsageAttributeError: The object is frozen.
        """
        if self._is_frozen:
            raise UsageAttributeError(
                f"{self._path}: can't modify frozen options. They froze when they were passed to "
                "trainingModel, inferenceModel or DataLoader: set everything before that, or "
                "change a copy made with options.clone()."
            )

    def _parts(self) -> dict[str, FreezableOptions]:
        return {k: v for k, v in self.__dict__.items() if isinstance(v, FreezableOptions)}

    def __copy__(self) -> Self:
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        twin.__dict__["_is_frozen"] = False
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != REFUSALS}

    # Hidden from the type checker, which would otherwise accept any name as an attribute.
    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: object) -> None:
            if name != "__class__":
                raise UsageAttributeError(f"{self._path} has no attribute '{name}' to set")
            object.__setattr__(self, name, value)


class OptionsGroup(FreezableOptions):
    """Named values: read as attributes, set by methods, and checked when they are set.

    The class body declares the values as :class:`Setting` objects; ``createOrSet`` adds others.
    """

    _values: dict[str, object]

    def __init__(self) -> None:
        super().__init__()
        settings = self._settings().items()
        values = {name: copy.deepcopy(s.default) for name, s in settings if s.has_default}
        self.__dict__["_values"] = values

    @classmethod
    def _settings(cls) -> dict[str, Setting[Any]]:
        return {
            name: member
            for base in reversed(cls.__mro__)
            for name, member in vars(base).items()
            if isinstance(member, Setting)
        }

    def __call__(self, option: str) -> Any:
        """Return the stored value of an option, as the attribute of the same name does.

        Args:
            option: The name of the option in snake case.

        Raises:
            UsageAttributeError: No such value is stored.
        """
        if option not in self._values:
            raise UsageAttributeError(self._unknown(option))
        return self._values[option]

    def set(self, **values: object) -> Self:
        """Set existing values.

        Args:
            **values: New values by their names in snake case.

        Returns:
            The object itself.

        Raises:
            UsageAttributeError: The object is frozen.
            UsageAssertionError: A name does not exist, or a value has another type than before.
        """
        self.checkIsFrozen()
        for name in values:
            if name not in self._values:
                raise UsageAssertionError(self._unknown(name))
        return self.createOrSet(**values)

    def createOrSet(self, **values: object) -> Self:
        """Set values, adding those that do not exist.

        A name that popsim_torch does not know is an error when a model is compiled.

        Args:
            **values: New values by their names in snake case.

        Returns:
            The object itself.

        Raises:
            UsageAttributeError: The object is frozen.
            UsageAssertionError: A value has another type than before.
        """
        self.checkIsFrozen()
        settings = self._settings()
        checked = {}
        for name, value in values.items():
            setting = settings.get(name)
            if setting is None:
                setting = Setting(self._values.get(name, value))
                setting.name = name
            checked[name] = setting.check(self._path, value)
        self._values.update(checked)
        return self

    def update(self, other: Mapping[str, object]) -> Self:
        """Set all values of a dictionary, as ``createOrSet`` does.

        Args:
            other: New values by their names in snake case.

        Returns:
            The object itself.

        Raises:
            UsageAttributeError: The object is frozen.
            UsageAssertionError: A value has another type than before.
        """
        return self.createOrSet(**other)

    def exists(self, name: str) -> bool:
        """Return whether a value is stored under a name.

        Args:
            name: The name in snake case.
        """
        return name in self._keys()

    def deleteIfExists(self, name: str) -> Self:
        """Remove a value; a setting with a default gets the default again.

        Args:
            name: The name in snake case.

        Returns:
            The object itself.

        Raises:
            UsageAttributeError: The object is frozen.
        """
        self.checkIsFrozen()
        self._values.pop(name, None)
        setting = self._settings().get(name)
        if setting is not None and setting.has_default:
            self._values[name] = copy.deepcopy(setting.default)
        return self

    def toDict(self) -> dict[str, Any]:
        """Return the stored values by name, as a new dictionary."""
        return self._keys()

    def _keys(self) -> dict[str, Any]:
        """Return the stored values that are visible to programs, by name."""
        settings = self._settings()
        return {
            name: value
            for name, value in self._values.items()
            if name not in settings or settings[name].is_key
        }

    def __repr__(self) -> str:
        values = ", ".join(self._items())
        return f"{self._path.rpartition('.')[2]}({values})"

    def _items(self) -> list[str]:
        """Return ``name=value`` for every stored value, sorted so that equal groups print alike."""
        return [f"{name}={shown(value)}" for name, value in sorted(self._keys().items())]

    def _figures(self) -> dict[str, object]:
        """Return the values that are not the defaults, as strings, sorted by name."""
        settings = self._settings()
        found: dict[str, object] = {}
        for name, value in sorted(self._keys().items()):
            setting = settings.get(name)
            if setting is None or not setting.has_default or value != setting.default:
                found[name] = shown(value)
        return found

    def _unknown(self, name: str) -> str:
        """Return the message for a name without a stored value."""
        if name in self._settings():
            setter = self._settings()[name].setter
            return f"{self._path}.{name} has not been set. Call {self._path}.{setter} first."
        close = closest_names(name, [*self._values, *(n for n in dir(type(self)) if n[0] != "_")])
        hint = f" Closest name: '{close[0]}'." if close else ""
        return f"{self._path} has no option '{name}'.{hint}"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise UsageAttributeError(f"{self._path} has no attribute '{name}'")
            return self(name)

        def __setattr__(self, name: str, value: object) -> None:
            if name.startswith("_") or isinstance(getattr(type(self), name, None), property):
                super().__setattr__(name, value)
            else:
                self.set(**{name: value})


def shown(value: object) -> str:
    """Return a value as a string, equal for equal values and without ids of objects.

    Args:
        value: The stored value.
    """
    return _OBJECT_ID.sub("", saferepr(value))


def require(condition: bool, message: str) -> None:
    """Raise the error of a wrong argument unless a condition is true.

    Args:
        condition: What must be true.
        message: The message of the error.

    Raises:
        UsageAssertionError: ``condition`` is false.
    """
    if not condition:
        raise UsageAssertionError(message)


def require_bool(call: str, value: object) -> None:
    """Raise the error of a wrong argument unless a value is True or False.

    Args:
        call: The setter, for the message.
        value: The user's value.

    Raises:
        UsageAssertionError: ``value`` is not a boolean; an int is refused, too.
    """
    require(isinstance(value, bool), f"{call}({value!r}): pass True or False.")


def require_enum(call: str, value: object, enum: type[IntEnum]) -> None:
    """Raise the error of a wrong argument unless a value is a member of an enum.

    Args:
        call: The setter, for the message.
        value: The user's value.
        enum: The enum of the value.

    Raises:
        UsageAssertionError: ``value`` is not a member; a plain int is refused, too.
    """
    members = ", ".join(f"{enum.__name__}.{member.name}" for member in enum)
    require(isinstance(value, enum), f"{call}({value!r}): use one of {members}.")
