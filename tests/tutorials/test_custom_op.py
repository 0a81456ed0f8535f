"""The tutorial of custom operators compiles its library, agrees with PyTorch, and shows times."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tutorials" / "custom_op" / "custom_op.py"


@pytest.mark.slow
@pytest.mark.tutorial
def test_the_operators_agree_and_are_measured(tmp_path):
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)])
    arguments = ["--rows", "32", "--columns", "64", "--repeats", "2"]
    result = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT), *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("values, gradients and updates are those of eager PyTorch") == 3
    rows = re.findall(r"^(\S.*?) {2,}(\d+\.\d\d) +(\d+\.\d\d)$", result.stdout, re.MULTILINE)
    assert [name for name, *_ in rows] == [
        "custom operator, C++",
        "custom operator, Python",
        "functions of torch",
        "eager PyTorch",
    ]
    assert list(tmp_path.rglob("*.so")) == []
