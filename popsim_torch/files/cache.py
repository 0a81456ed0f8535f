"""The executable cache: programs of earlier compilations, in a directory for several processes.

A file holds the program of a key (``trace_key``). A process that does not find a program locks the
directory, looks again, makes the program and writes it. If several processes need the same program,
one makes it and the others wait. The lock belongs to the open directory: nothing of it is left,
even if its holder is killed.

The cache saves time and never changes results: any problem with it is a warning, and the program is
made as without a cache. This includes a problem that is found only when the program is fitted to
this machine. Programs with operators that a file may not name are not cached.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from popsim_torch import logs
from popsim_torch.errors import Error
from popsim_torch.files.container import read_sections, write_sections
from popsim_torch.files.operators import foreign_operators
from popsim_torch.files.parts import pack, unpack
from popsim_torch.files.program import pack_program, unpack_program
from popsim_torch.files.whole_file import remove_leftovers
from popsim_torch.ir import Program
from popsim_torch.options import Options

fcntl: Any
try:
    import fcntl
except ImportError:  # not on Windows: without a lock, programs may be made more often than needed
    fcntl = None

__all__ = ["CachedProgram", "cached_program"]

_CONTENT = "a cached program"
_NAME = "{key}.popsim"


@dataclass(frozen=True)
class CachedProgram:
    """A program, and how to make it again if a problem with it is found.

    Attributes:
        program: The program, made or read from a file.
        make: Makes the program.
        file: The file that it was read from, and its key; None if it was made.
    """

    program: Program
    make: Callable[[], Program]
    file: tuple[Path, str] | None = None

    def anew(self, error: Exception) -> Program:
        """Make the program again, cache it, and return it.

        Args:
            error: The error of the program that was read; raised if the program was not read.
        """
        if self.file is None:
            raise error
        path, key = self.file
        logs.python.warning(
            "A program of the executable cache, %s, is ignored and written again: %s",
            path,
            str(error) or repr(error),
        )
        program = self.make()
        with contextlib.suppress(OSError), _locked(path.parent):
            _write(path, key, program)
        return program


def cached_program(
    options: Options, key_of: Callable[[], str | None], make: Callable[[], Program]
) -> CachedProgram:
    """Return a program, from the directory of the options if it is there.

    Args:
        options: The options, which may choose a cache; see ``Options.enableExecutableCaching``.
        key_of: Returns the key of everything that the program depends on; None if that is unknown.
        make: Makes the program.
    """
    settings = options._Popart.options
    folder = settings.get("cachePath")
    if not settings.get("enableEngineCaching") or not folder:
        return CachedProgram(make(), make)
    key = key_of()
    if key is None:
        logs.backend.debug("The model is not cached: it is unknown what it depends on.")
        return CachedProgram(make(), make)
    path = Path(folder) / _NAME.format(key=key)
    with contextlib.ExitStack() as lock:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            program = _read(path, key, warn=False)
            if program is None:
                lock.enter_context(_locked(path.parent))
                program = _read(path, key, warn=True)
        except (OSError, ValueError) as error:  # ValueError: an invalid path
            logs.python.warning("The executable cache %r cannot be used (%s).", folder, error)
            return CachedProgram(make(), make)
        if program is None:
            program = make()
            _write(path, key, program)
            return CachedProgram(program, make)
    logs.backend.debug("The program was found in the executable cache: %s", path)
    return CachedProgram(program, make, (path, key))


def _write(path: Path, key: str, program: Program) -> None:
    """Write a program to the cache, while the lock is held."""
    foreign = foreign_operators(program.graph)
    if foreign:
        logs.backend.debug(
            "The program is not cached: it calls %s, which no file may do.", ", ".join(foreign)
        )
        return
    try:
        remove_leftovers(path.parent, _CONTENT)
        write_sections(path, _CONTENT, {**pack("key", key, "key"), **pack_program(program)})
    except (Error, OSError) as error:
        logs.python.warning("The program is not written to the executable cache: %s", error)


def _read(path: Path, key: str, *, warn: bool) -> Program | None:
    """Return the program of a file; None if the file does not exist or cannot be used."""
    if not path.exists():
        return None
    try:
        sections = read_sections(path, _CONTENT)
        if unpack(sections, "key") != key:
            raise ValueError("it belongs to another program")
        return unpack_program(sections)
    except Exception as error:  # the file may contain anything
        if warn:
            logs.python.warning(
                "A file of the executable cache is ignored and written again: %s", error
            )
        return None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the directory against other processes, if the file system supports that."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)  # this releases the lock


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    except BlockingIOError:
        logs.backend.debug("The executable cache %s is locked by another process.", folder)
    except OSError as error:
        logs.backend.debug("The executable cache %s cannot be locked (%s).", folder, error)
        return
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    logs.backend.debug("The other process released the cache lock of %s.", folder)
