"""Runs a script or a module as ``python`` does, with this package in PopTorch's place."""

from __future__ import annotations

import builtins
import io
import os
import pkgutil
import runpy
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType, TracebackType
from typing import Any

from popsim_torch import environment, logs
from popsim_torch.alias import STANDIN_FOLDER, install
from popsim_torch.errors import Error

__all__ = ["CannotStart", "import_file", "run_module", "run_script"]


class CannotStart(Exception):
    """A program could not be started; the message says why."""


_PATH_VARIABLE = "PYTHONPATH"


def run_script(path: str, arguments: list[str], *, replace: bool = False) -> None:
    """Run a script as ``python script.py ...`` does.

    Args:
        path: A file with Python code, or a folder or archive with a ``__main__.py``.
        arguments: The arguments of the script.
        replace: Whether to replace another ``poptorch`` that is installed.

    Raises:
        CannotStart: The script cannot be read, or another ``poptorch`` is installed.
        BaseException: The exception of the script; ``SystemExit`` carries its exit code.
    """
    sys.argv[:] = [path, *arguments]
    if pkgutil.get_importer(path) is not None:
        _prepare(path, replace)
        _run_as_main("__main__")
        return
    full_path = os.path.abspath(path)
    try:
        with io.open_code(full_path) as file:
            source = file.read()
    except OSError as error:
        raise CannotStart(
            f"can't open file '{full_path}': [Errno {error.errno}] {error.strerror}"
        ) from None
    _prepare(None if _has_safe_path() else os.path.dirname(os.path.realpath(path)), replace)
    main = _new_main()
    main.__dict__.update(
        __file__=full_path,
        __cached__=None,
        __loader__=SourceFileLoader("__main__", full_path),
        __annotations__={},
    )
    exec(compile(source, full_path, "exec", dont_inherit=True), main.__dict__)


def run_module(name: str, arguments: list[str], *, replace: bool = False) -> None:
    """Run a module as ``python -m module ...`` does.

    Args:
        name: The name of the module.
        arguments: The arguments that the module finds in ``sys.argv``.
        replace: Whether to replace another ``poptorch`` that is installed.

    Raises:
        CannotStart: Another ``poptorch`` is installed.
        BaseException: The exception of the module; ``SystemExit`` carries its exit code.
    """
    sys.argv[:] = ["-m", *arguments]
    _prepare(None if _has_safe_path() else os.getcwd(), replace)
    _run_as_main(name)


def import_file(path: str) -> ModuleType:
    """Import a file as ``import`` does for a module beside it, with this package as ``poptorch``.

    Args:
        path: A file with Python code.

    Raises:
        CannotStart: There is no such file, or another ``poptorch`` is installed.
        BaseException: The exception of the file.
    """
    full_path = os.path.abspath(path)
    if not os.path.isfile(full_path):
        raise CannotStart(f"can't open file '{full_path}': there is no such file")
    _prepare(None if _has_safe_path() else os.path.dirname(os.path.realpath(path)), False)
    name = os.path.splitext(os.path.basename(path))[0]
    spec = spec_from_file_location(name, full_path, loader=SourceFileLoader(name, full_path))
    assert spec is not None and spec.loader is not None  # (the loader is given)
    module = module_from_spec(spec)
    sys.modules[name] = module  # for classes that look for their module
    spec.loader.exec_module(module)
    return module


def _has_safe_path() -> bool:
    """Whether Python was started with ``-P``, which adds no folder to the search path."""
    return bool(getattr(sys.flags, "safe_path", False))


def _run_as_main(name: str) -> None:
    _new_main()
    # The private function that `python -m` calls; no public function does the same.
    run: Any = runpy._run_module_as_main  # type: ignore[attr-defined]
    run(name, alter_argv=name != "__main__")


def _prepare(folder: str | None, replace: bool) -> None:
    """Make this process, and the processes that it starts, find this package as ``poptorch``.

    Args:
        folder: The folder to put first on the search path in place of the runner's, if any.
        replace: Whether to replace another ``poptorch`` that is installed.
    """
    if folder is not None:
        sys.path[: 0 if _has_safe_path() else 1] = [folder]
    try:
        # Read the variables later: the script may set them before it imports poptorch.
        install(replace, before=_read_environment)
    except Error as error:
        raise CannotStart(error.message) from None
    # Processes of multiprocessing get the search path of this process, others the variable.
    inherited = os.environ.get(_PATH_VARIABLE)
    if STANDIN_FOLDER not in sys.path:
        sys.path.insert(1, STANDIN_FOLDER)
    if STANDIN_FOLDER not in (inherited or "").split(os.pathsep):
        os.environ[_PATH_VARIABLE] = os.pathsep.join(filter(None, [STANDIN_FOLDER, inherited]))
    sys.excepthook = _WithoutRunner(sys.excepthook)


def _read_environment() -> None:
    logs.obey_environment()
    environment.check()


def _new_main() -> ModuleType:
    """Return a module ``__main__`` for the script, in place of the runner's."""
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    return main


class _WithoutRunner:
    """A ``sys.excepthook`` that leaves the runner out of tracebacks."""

    def __init__(self, previous: Any) -> None:
        self._previous = previous

    def __call__(
        self, kind: type[BaseException], value: BaseException, trace: TracebackType | None
    ) -> None:
        entry, found = trace, None
        while entry is not None:
            if entry.tb_frame.f_code.co_filename == __file__:
                found = entry
            entry = entry.tb_next
        if found is not None:
            trace = found.tb_next
        self._previous(kind, value.with_traceback(trace), trace)
