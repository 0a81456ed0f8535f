"""``install``: makes ``import poptorch``, and the modules of ``poptorch``, mean this package."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType

from popsim_torch.errors import Error

__all__ = ["STANDIN_FOLDER", "install", "uninstall"]

STANDIN_FOLDER = str(Path(__file__).resolve().parent / "standin")
"""If this folder is on the search path, importing ``poptorch`` has the effect of ``install``."""

_PACKAGE = "popsim_torch"
_ALIAS = "poptorch"


class _Alias(InspectLoader):
    """Loads a module of this package, unchanged, under its PopTorch name."""

    def __init__(self, real_name: str, before: Callable[[], None] | None) -> None:
        self._real_name = real_name
        self._before = before
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        if self._before is not None:
            self._before()
        try:
            module = importlib.import_module(self._real_name)
        except ModuleNotFoundError as error:
            if error.name != self._real_name:
                raise
            raise ModuleNotFoundError(
                f"No module named {spec.name!r}: popsim_torch, which replaces PopTorch here, has "
                "no module of that name.",
                name=spec.name,
            ) from None
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module has already run. The import system replaced its spec: put the own one back.
        module.__spec__ = self._spec

    # `python -m` calls the following methods.

    def get_code(self, fullname: str) -> CodeType | None:
        return self._real_loader().get_code(self._real_name)

    def get_source(self, fullname: str) -> str | None:
        return self._real_loader().get_source(self._real_name)

    def is_package(self, fullname: str) -> bool:
        return self._real_loader().is_package(self._real_name)

    def _real_loader(self) -> InspectLoader:
        spec = importlib.util.find_spec(self._real_name)
        if spec is None or not isinstance(spec.loader, InspectLoader):
            raise ImportError(
                f"the module {self._real_name} has no Python code", name=self._real_name
            )
        return spec.loader


class _Finder(MetaPathFinder):
    """Finds ``poptorch`` and its modules.

    Args:
        before: Called before ``poptorch`` is imported.
    """

    def __init__(self, before: Callable[[], None] | None) -> None:
        self._before = before

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _ALIAS and not fullname.startswith(f"{_ALIAS}."):
            return None
        before = self._before if fullname == _ALIAS else None
        real_name = _PACKAGE + fullname.removeprefix(_ALIAS)
        return importlib.util.spec_from_loader(fullname, _Alias(real_name, before))


def install(replace: bool = False, *, before: Callable[[], None] | None = None) -> None:
    """Make ``import poptorch`` import this package in this process.

    Processes that this process starts have to call ``install`` as well. Those of
    :mod:`multiprocessing` do this if the call is at the top of the script. With ``python -m
    popsim_torch run script.py`` no call is needed in any process. A second call changes nothing.

    Args:
        replace: Whether to replace another ``poptorch`` that is installed.
        before: Called once, before ``poptorch`` is imported for the first time.

    Raises:
        Error: Another ``poptorch`` is imported or installed, and ``replace`` is False.
    """
    other = _other_poptorch()
    if other is not None and not replace:
        raise Error(
            f"popsim_torch.install: there is another {_ALIAS} at {other}. Remove it from the "
            "environment, or let popsim_torch replace it: popsim_torch.install(replace=True), or "
            "popsim run --replace script.py."
        )
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for name in _imported():
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder(before))


def uninstall() -> None:
    """Undo ``install``: later imports get the ``poptorch`` of the environment.

    Names that the program has already imported do not change.
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path[:] = [item for item in sys.meta_path if not isinstance(item, _Finder)]
    for name in _imported():
        del sys.modules[name]


def _imported() -> list[str]:
    return [name for name in sys.modules if name == _ALIAS or name.startswith(f"{_ALIAS}.")]


def _other_poptorch() -> str | None:
    """Return where another ``poptorch`` comes from, or None if there is no other."""
    module = sys.modules.get(_ALIAS)
    if module is not None:
        is_ours = module is sys.modules[_PACKAGE] or _is_standin(module.__spec__)
        return None if is_ours else str(getattr(module, "__file__", None) or module)
    for spec in _found():
        if not _is_standin(spec):
            return spec.origin or str(spec.name)
    return None


def _found() -> Iterator[ModuleSpec]:
    """Yield the specs that other finders find, without folders that have no ``__init__.py``."""
    path = [folder for folder in sys.path if folder != STANDIN_FOLDER]
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            continue
        where = path if finder is importlib.machinery.PathFinder else None
        spec = finder.find_spec(_ALIAS, where)
        if spec is not None and spec.loader is not None:
            yield spec


def _is_standin(spec: ModuleSpec | None) -> bool:
    return spec is not None and str(spec.origin).startswith(STANDIN_FOLDER)
