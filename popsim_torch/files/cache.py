"""Programs of earlier compilations, in a directory that processes may share.

A file holds the program of a key (``trace_key``). Who misses one locks the directory, looks once
more, makes the program and writes it; so of several processes that need the same one, one makes it
and the others wait. The lock belongs to the open directory: nothing of it stays behind, also when
its holder is killed.

A cache saves time and has no say in results: whatever is wrong with it is a warning, and the
program is made as if there were none. That goes for a program that only turns out to be wrong when
it is fitted to this machine. Programs with operators that no file may name are not kept.
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
except ImportError:  # not on Windows: programs are then made more often than needed
    fcntl = None

__all__ = ["CachedProgram", "cached_program"]

_CONTENT = "a cached program"
_NAME = "{key}.popsim"


@dataclass(frozen=True)
class CachedProgram:
    """A program, and what to do if it turns out to be wrong.

    Attributes:
        program: Made, or read from a file.
        make: Makes it.
        file: The file that it was read from, and its key; None if it was made.
    """

    program: Program
    make: Callable[[], Program]
    file: tuple[Path, str] | None = None

    def anew(self, error: Exception) -> Program:
        """Return the program as it is made, and keep that.

        Args:
            error: What went wrong with the one that was read; raised if none was.
        """
        if self.file is None:
            raise error
        path, key = self.file
        logs.python.warning(
            "A program of the executable cache, %s, cannot be used and is made anew: %s",
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
    """Return a program, from the directory that the options name if it is there.

    Args:
        options: May ask for a cache; see ``Options.enableExecutableCaching``.
        key_of: Returns what the program depends on; None if that is not known.
        make: Makes the program.
    """
    settings = options._Popart.options
    folder = settings.get("cachePath")
    if not settings.get("enableEngineCaching") or not folder:
        return CachedProgram(make(), make)
    key = key_of()
    if key is None:
        logs.backend.debug("The model is not cached: it cannot be told what it depends on.")
        return CachedProgram(make(), make)
    path = Path(folder) / _NAME.format(key=key)
    with contextlib.ExitStack() as lock:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            program = _read(path, key, warn=False)
            if program is None:
                lock.enter_context(_locked(path.parent))
                program = _read(path, key, warn=True)
        except (OSError, ValueError) as error:  # ValueError: a path that no system has
            logs.python.warning("The executable cache %r cannot be used (%s).", folder, error)
            return CachedProgram(make(), make)
        if program is None:
            program = make()
            _write(path, key, program)
            return CachedProgram(program, make)
    logs.backend.debug("The program was found in the executable cache: %s", path)
    return CachedProgram(program, make, (path, key))


def _write(path: Path, key: str, program: Program) -> None:
    """Keep a program, under the lock."""
    foreign = foreign_operators(program.graph)
    if foreign:
        logs.backend.debug(
            "The program is not kept: it calls %s, which no file may do.", ", ".join(foreign)
        )
        return
    try:
        remove_leftovers(path.parent, _CONTENT)
        write_sections(path, _CONTENT, {**pack("key", key, "key"), **pack_program(program)})
    except (Error, OSError) as error:
        logs.python.warning("The program is not kept in the executable cache: %s", error)


def _read(path: Path, key: str, *, warn: bool) -> Program | None:
    """Return the program of a file; None if there is no such file, or it is of no use."""
    if not path.exists():
        return None
    try:
        sections = read_sections(path, _CONTENT)
        if unpack(sections, "key") != key:
            raise ValueError("it belongs to another program")
        return unpack_program(sections)
    except Exception as error:  # whatever somebody may have put there
        if warn:
            logs.python.warning(
                "A file of the executable cache is ignored and written anew: %s", error
            )
        return None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other processes out, as far as the file system can."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)  # with it the lock goes


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
