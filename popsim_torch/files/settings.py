"""Options in a file."""

from __future__ import annotations

from collections.abc import Mapping

from popsim_torch.enums import ConnectionType
from popsim_torch.errors import Error
from popsim_torch.files.parts import pack, unpack
from popsim_torch.options import Options
from popsim_torch.tensors.selections import Selection, has_function

__all__ = ["pack_options", "unpack_options"]

_PART = "options"
_OWN = "._values"
"""Where the values of ``Options`` itself are stored."""


def pack_options(options: Options) -> dict[str, bytes]:
    """Return the sections of options.

    Args:
        options: The options in use.

    Raises:
        Error: A value is not plain data: a function that selects tensors for an anchor, or an
            option unknown to popsim_torch.
    """
    for short_name, (long_name, *_) in options.anchored_tensors.items():
        if isinstance(long_name, Selection) and has_function(long_name):
            raise Error(
                f"Options.anchorTensor({short_name!r}, ...) selects tensors with a function, and a "
                "file can hold only data. Use a pattern or the selections of poptorch.tensors, or "
                "compile the model anew without this anchor."
            )
    stored = _stored(options)
    stored[_OWN] = {**stored[_OWN], "_observations": []}  # what is observed is no part of files
    return pack(_PART, stored, "Options")


def unpack_options(sections: Mapping[str, bytes]) -> Options:
    """Return the options of a file, which are not frozen.

    Args:
        sections: The sections of the file.

    Raises:
        ValueError: The sections contain no valid options.
    """
    options = Options()
    known, found = _stored(options), unpack(sections, _PART)
    if not isinstance(found, dict) or found.keys() != known.keys():
        raise ValueError("its options are none")
    for name, values in known.items():
        if not isinstance(found[name], dict):
            raise ValueError(f"its options have no '{name}'")
        # Change the groups in place, because they refer to each other.
        values.clear()
        values.update(found[name])
    return options


def attach_when_loaded(options: Options) -> None:
    """Remove the settings of options that compile for a machine that is not available.

    Args:
        options: The options, changed in place.
    """
    if options.connection_type == ConnectionType.Never:
        options.connectionType(ConnectionType.Always)
    options.deleteIfExists("ipu_version")


def _stored(options: Options) -> dict[str, dict[str, object]]:
    """Return the dictionaries with the values of options, by group and attribute."""
    return {
        f"{group}.{attribute}": values
        for group, part in {"": options, **options._parts()}.items()
        for attribute, values in vars(part).items()
        if isinstance(values, dict)
    }
