"""Writes files whole or not at all."""

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

_USUAL_PERMISSIONS = 0o666  # less the umask

# The name of a file that is not complete yet, beside the one that it is to replace. It has the
# kind of that one and not the name, since file systems limit the length.
_TEMPORARY = ".{kind}.{token}.writing"


def write_whole(path: Path, kind: str, write: Callable[[BinaryIO], object]) -> None:
    """Write a file, or leave the one that was there as it is.

    Everything goes to a temporary file in the same folder, which takes the name when it is on the
    disk. What is killed meanwhile leaves that file behind, and the old one intact.

    Args:
        path: The file. One that a symbolic link leads to is replaced there. Who may read and write
            a file stays as it was.
        kind: What kind of file it is: a part of the temporary one's name.
        write: Writes the content to an open file.

    Raises:
        Error: It cannot be written, or is there and no regular file.
    """
    try:
        target = Path(os.path.realpath(path))
        permissions = _permissions(target)
        temporary = target.with_name(_temporary_name(kind, secrets.token_hex(8)))
        try:
            # Nobody may read what nobody could read before, at no time.
            mode = _USUAL_PERMISSIONS if permissions is None else permissions
            with open(temporary, "xb", opener=partial(os.open, mode=mode)) as file:
                if permissions is not None:
                    with contextlib.suppress(OSError):  # not every file system has them
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
    """Return who may do what with the file that is to be replaced; None if there is none.

    Raises:
        OSError: It is there and no regular file, which a rename would remove.
    """
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        raise OSError("it is no regular file, but a folder, device, pipe or socket")
    return stat.S_IMODE(mode)


def _temporary_name(content: str, token: str) -> str:
    return _TEMPORARY.format(kind=content.replace(" ", "-"), token=token)


def remove_leftovers(folder: Path, content: str) -> None:
    """Remove what writers that were killed left behind.

    Args:
        folder: Nobody else is writing files of this kind there.
        content: The kind.
    """
    for path in folder.glob(_temporary_name(content, "*")):
        path.unlink(missing_ok=True)


def _make_durable(folder: Path) -> None:
    """Bring a new name to the disk; not every file system lets a program ask for it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
