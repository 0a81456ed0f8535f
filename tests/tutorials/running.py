"""Ways to run a tutorial script on a few digits."""

import argparse
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common import digits
from tests.forks import run_forked

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "tutorials"


def draw_few_digits(root: Path, num_train: int) -> Path:
    """Write a folder in MNIST's layout, and return it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "_FILES", {"train": ("train", num_train), "test": ("t10k", 32)})
        digits.write_mnist(root)
    return root


def copy_tutorials(folder: Path) -> Path:
    """Copy the tutorials beside a link to this environment, as in a checkout; return where to."""
    copied = folder / "tutorials"
    shutil.copytree(TUTORIALS, copied, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / ".venv").symlink_to(sys.prefix)
    return copied


def data_arguments(root: Path) -> argparse.Namespace:
    """Return what a script's parser makes of ``--data-root``."""
    return argparse.Namespace(data_root=root, download=False)


def run_here(script: Path, *arguments: str) -> None:
    """Run a script in this process, which has imported torch already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(script), *arguments])
        patch.setattr(sys, "path", [str(script.parent), *sys.path])
        runpy.run_path(str(script), run_name="__main__")
    # Another tutorial may have modules of the same names.
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "").parent == script.parent:
            del sys.modules[name]


def run_alone(
    script: Path, folder: Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess:
    """Run a script in a process and a folder of its own; every warning is an error."""
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)])
    env = os.environ | {"PYTHONPATH": path, "HOME": str(folder)} | variables
    return run_forked([str(script), *arguments], cwd=folder, env=env, strict=True)
