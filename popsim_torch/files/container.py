"""A file of named sections: written completely or not at all, and checked before it is used.

    magic | size of the head | SHA-256 of the head | head (JSON) | the sections, one after another

The head names the version of the package that wrote the file, what kind of file it is, and size
and SHA-256 of each section. So a file that is incomplete, changed, or of another kind is detected
before a section is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from popsim_torch.errors import Error, UsageAssertionError
from popsim_torch.files.whole_file import write_whole
from popsim_torch.version import __version__

__all__ = ["BadFileError", "read_sections", "write_sections"]

_MAGIC = b"\x89POPSIM-1\r\n\x1a\n"
_SIZE = struct.Struct("<Q")
_DIGEST_BYTES = hashlib.sha256().digest_size


class BadFileError(Error):
    """A file is wrong; the message names the file and the problem."""

    def __init__(self, path: str | os.PathLike[str], problem: str) -> None:
        super().__init__(f"{os.fspath(path)}: {problem}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Error, (self.message,)


def write_sections(path: Path, content: str, sections: Mapping[str, bytes]) -> None:
    """Write a file completely, or leave an existing file unchanged.

    Args:
        path: The file (``write_whole``).
        content: The kind of file.
        sections: Data by name.

    Raises:
        Error: The file cannot be written, or exists and is not a regular file.
    """
    table = [[name, len(data), hashlib.sha256(data).hexdigest()] for name, data in sections.items()]
    head = json.dumps({"version": __version__, "content": content, "sections": table}).encode()

    def write(file: BinaryIO) -> None:
        file.write(_MAGIC + _SIZE.pack(len(head)) + hashlib.sha256(head).digest() + head)
        for data in sections.values():
            file.write(data)

    write_whole(path, content, write)


def read_sections(path: str | os.PathLike[str], content: str) -> dict[str, bytes]:
    """Check that a file is unchanged, and return its sections.

    Args:
        path: The file.
        content: The expected kind of file.

    Raises:
        BadFileError: The file cannot be read, is damaged, or is another kind of file.
        UsageAssertionError: Another version of the package wrote the file.
    """
    data = _read_whole(path)
    start = len(_MAGIC) + _SIZE.size + _DIGEST_BYTES
    (head_size,) = _SIZE.unpack_from(data.ljust(start), len(_MAGIC))
    head_bytes = data[start : start + head_size]
    if hashlib.sha256(head_bytes).digest() != data[start - _DIGEST_BYTES : start]:
        raise _damaged(path, "its head")
    try:
        head = json.loads(head_bytes)
        version, found, table = head["version"], head["content"], head["sections"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise _damaged(path, "its head") from error
    if version != __version__:
        raise UsageAssertionError(
            f"{os.fspath(path)}: written by version {version} of popsim_torch, and this is version "
            f"{__version__}. Only the version that wrote a file can read it: export the model "
            "again."
        )
    if found != content:
        raise BadFileError(path, f"the file holds {found}, not {content}.")
    try:
        return _split(path, memoryview(data)[start + head_size :], table)
    except (TypeError, ValueError) as error:
        raise _damaged(path, "its table of sections") from error


def _read_whole(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a file, if it is a regular file that begins with the right bytes."""
    try:
        # Check first, because opening a pipe would wait for a writer.
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise BadFileError(
                    path, "this is not a regular file, but a folder, device, pipe or socket."
                )
            data = file.read(len(_MAGIC))
            if data == _MAGIC:
                return data + file.read()
    except OSError as error:
        raise BadFileError(path, f"the file cannot be read ({error.strerror or error}).") from error
    except ValueError as error:
        raise BadFileError(repr(path), f"no file has that name ({error}).") from error
    raise BadFileError(
        path,
        "this is not a file of popsim_torch, or its beginning is damaged. Pass a file that "
        "PoplarExecutor.save, compileAndExport or Options.watch wrote.",
    )


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _split(
    path: str | os.PathLike[str], data: memoryview, table: list[tuple[str, int, str]]
) -> dict[str, bytes]:
    if len(data) != sum(size for _, size, _ in table):
        raise _damaged(path, "its length")
    sections = {}
    start = 0
    for name, size, digest in table:
        section = data[start : start + size]
        if hashlib.sha256(section).hexdigest() != digest:
            raise _damaged(path, f"the section '{name}'")
        sections[name] = bytes(section)
        start += size
    return sections


def _damaged(path: str | os.PathLike[str], what: str) -> BadFileError:
    return BadFileError(
        path,
        f"the file is damaged: {what} is not as it was written. Use another copy of the file, or "
        "export the model again.",
    )
