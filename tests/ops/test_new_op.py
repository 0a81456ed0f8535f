"""A new op is one entry: a file more, and the library has it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from popsim_torch import build_info

ROOT = Path(__file__).parents[2]
NEW = Path(__file__).with_name("new_op")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_file_with_one_entry_is_a_new_op(tmp_path):
    for name in ("csrc", "popsim_torch"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__", "listed.h")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copy(NEW / "negate.cpp", tmp_path / "csrc/ops/layout/negate.cpp")
    target = build_info().usable_targets[-1].replace("amx", "avx512")  # which has its kernels
    environment = {**os.environ, "POPSIM_TARGETS": target, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    for command in (
        ["setup.py", "--quiet", "build_ext", "--inplace"],
        [str(NEW / "try_negate.py")],
    ):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "ran negate" in done.stdout
