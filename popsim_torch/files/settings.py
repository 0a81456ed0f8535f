"""Options in a file."""

from __future__ import annotations

from collections.abc import Mapping

from popsim_torch.enums import ConnectionType
from popsim_torch.files.parts import pack, unpack
from popsim_torch.options import Options

__all__ = ["pack_options", "unpack_options"]

_PART = "options"


def pack_options(options: Options) -> dict[str, bytes]:
    """Return the sections of options.

    Args:
        options: Those in use.

    Raises:
        Error: A value is more than data; only one that popsim_torch does not know can be.
    """
    return pack(_PART, _stored(options), "Options")


def unpack_options(sections: Mapping[str, bytes]) -> Options:
    """Return the options of a file, which can be changed.

    Args:
        sections: Of the file.

    Raises:
        ValueError: They are none.
    """
    options = Options()
    known, found = _stored(options), unpack(sections, _PART)
    if not isinstance(found, dict) or found.keys() != known.keys():
        raise ValueError("its options are none")
    for name, values in known.items():
        if not isinstance(found[name], dict):
            raise ValueError(f"its options have no '{name}'")
        # In place: groups know each other's values.
        values.clear()
        values.update(found[name])
    return options


def attach_when_loaded(options: Options) -> None:
    """Take out of options what let a model be compiled for a machine that was not there.

    Args:
        options: Changed in place.
    """
    if options.connection_type == ConnectionType.Never:
        options.connectionType(ConnectionType.Always)
    options.deleteIfExists("ipu_version")


def _stored(options: Options) -> dict[str, dict[str, object]]:
    """Return the dictionaries that options keep their values in, by group and attribute."""
    return {
        f"{group}.{attribute}": values
        for group, part in {"": options, **options._parts()}.items()
        for attribute, values in vars(part).items()
        if isinstance(values, dict)
    }
