"""``POPSIM_DUMP=folder``: the program as text after each step of a compilation."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

from popsim_torch.errors import Error
from popsim_torch.ir import Program, program_text

VARIABLE = "POPSIM_DUMP"
GRAPH_VARIABLE = "POPTORCH_EXPORT_PROTO_FILE"


class Dump:
    """Writes one file for each step, such as ``03_lower.txt``, to a new folder per compilation.

    Args:
        folder: The parent of the new folder; None to write nothing.
        name: The name of the compilation, such as ``Net_training``.

    Raises:
        Error: The folder cannot be made.
    """

    def __init__(self, folder: Path | None, name: str) -> None:
        self._numbers = itertools.count()
        self._folder = None if folder is None else _new_folder(folder, name)

    @classmethod
    def from_environment(cls, name: str) -> Dump:
        """Return the dump that the environment variable ``POPSIM_DUMP`` asks for."""
        folder = os.environ.get(VARIABLE)
        return cls(Path(folder) if folder else None, name)

    @property
    def on(self) -> bool:
        """Whether files are written; if not, callers need not make the texts."""
        return self._folder is not None

    def write(self, step: str, text: str) -> None:
        """Write the result of a step."""
        if self._folder is not None:
            path = self._folder / f"{next(self._numbers):02}_{step}.txt"
            path.write_text(text, encoding="utf-8")


def _new_folder(parent: Path, name: str) -> Path:
    plain = re.sub(r"\W", "_", name)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            folder = parent / f"{number:03}_{plain}"
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            return folder
    except OSError as error:
        raise Error(
            f"{VARIABLE}={parent}: no folder can be created there ({error}). Set the variable to "
            "a folder with write permission, or unset it."
        ) from error
    raise AssertionError("unreachable")


def write_graph_file(program: Program) -> None:
    """Write a program as text to the path in the variable ``POPTORCH_EXPORT_PROTO_FILE``.

    A path without an extension is a folder, and the file in it is ``model.proto``. Missing folders
    are created. The text is UTF-8, also with ``POPTORCH_EXPORT_PROTO_AS_BINARY=1``.

    Args:
        program: The complete program, the same on every machine.

    Raises:
        Error: The file cannot be written.
    """
    wanted = os.environ.get(GRAPH_VARIABLE)
    if not wanted:
        return
    path = Path(wanted)
    if not path.suffix or path.is_dir():
        path = path / "model.proto"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(program_text(program).encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise Error(
            f"{GRAPH_VARIABLE}={wanted}: the graph cannot be written there ({error}). Set the "
            "variable to a file with write permission, or unset it."
        ) from error
