"""Writes files completely or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

from popsim_torch.errors import Error

__all__ = ["remove_leftovers", "write_whole"]

_USUAL_PERMISSIONS = 0o666  # without the bits of the umask

# The name of an incomplete file, in the folder of the file that it will replace. It contains the
# kind of that file and not the name, because file systems limit the length of names.
_TEMPORARY = ".{kind}.{token}.writing"


def write_whole(path: Path, kind: str, write: Callable[[BinaryIO], object]) -> None:
    """Write a file completely, or leave an existing file unchanged.

    The content is written to a temporary file in the same folder, which is renamed when it is on
    the disk. A process that is killed before that leaves the temporary file behind, and the old
    file unchanged.

    Args:
        path: The file. For a symbolic link, its target is replaced. The permissions of an existing
            file are kept.
        kind: The kind of file, which is a part of the temporary file's name.
        write: Writes the content to an open file.

    Raises:
        Error: The file cannot be written, or exists and is not a regular file.
    """
    try:
        target = Path(os.path.realpath(path))
        permissions = _permissions(target)
        temporary = target.with_name(_temporary_name(kind, secrets.token_hex(8)))
        try:
            # Set the permissions before writing: the content must never be readable for more users
            # than before.
            mode = _USUAL_PERMISSIONS if permissions is None else permissions
            with open(temporary, "xb", opener=partial(os.open, mode=mode)) as file:
                if permissions is not None:
                    with contextlib.suppress(OSError):  # not every file system has permissions
                        os.chmod(temporary, permissions)
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        _make_durable(target.parent)
    except (OSError, ValueError) as error:  # ValueError: a path that no system has
        raise Error(
            f"{path}: the file cannot be written ({error}). What was there before is unchanged."
        ) from error


def _permissions(target: Path) -> int | None:
    """Return the permissions of the file that will be replaced; None if there is none.

    Raises:
        OSError: The path is not a regular file, and a rename would remove it.
    """
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        raise OSError("it is not a regular file, but a folder, device, pipe or socket")
    return stat.S_IMODE(mode)


def _temporary_name(content: str, token: str) -> str:
    return _TEMPORARY.format(kind=content.replace(" ", "-"), token=token)


def remove_leftovers(folder: Path, content: str) -> None:
    """Remove the temporary files of killed processes.

    Args:
        folder: The folder, in which no other process may be writing files of this kind.
        content: The kind of file.
    """
    for path in folder.glob(_temporary_name(content, "*")):
        path.unlink(missing_ok=True)


def _make_durable(folder: Path) -> None:
    """Write a new file name to the disk, if the file system supports that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
