"""The package refuses a library that does not fit, and the build refuses unknown targets."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch import _native, build_info

SETUP = Path(__file__).parents[2] / "setup.py"


def test_this_library_was_built_for_this_pytorch():
    release = (Path(poptorch.__file__).parent / "built_for.txt").read_text().strip()
    assert torch.__version__.startswith(f"{release}.")


def test_a_library_for_another_pytorch_is_refused(tmp_path, monkeypatch):
    (tmp_path / "built_for.txt").write_text("2.1\n")
    monkeypatch.setattr(_native, "_FOLDER", tmp_path)
    with pytest.raises(ImportError, match=r"built for PyTorch 2\.1, and this is PyTorch") as caught:
        _native._check_torch()
    assert torch.__version__ in str(caught.value)
    assert "pip install torch==2.1.*" in str(caught.value)


def test_a_later_patch_of_the_same_release_is_taken(monkeypatch):
    release = (Path(poptorch.__file__).parent / "built_for.txt").read_text().strip()
    monkeypatch.setattr(torch, "__version__", f"{release}.99+cu130")
    _native._check_torch()


def test_a_package_that_was_not_built_says_how_to(tmp_path, monkeypatch):
    monkeypatch.setattr(_native, "_FOLDER", tmp_path)
    with pytest.raises(ImportError, match=r"was not built\. Run `make build`"):
        _native._check_torch()


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("sse4,avx9", "unknown avx9; there are "),
        ("baseline,avx2", "baseline goes with no other target"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="the targets are those of x86-64 on Linux")
def test_the_build_refuses_targets(targets, message):
    result = subprocess.run(
        [sys.executable, str(SETUP), "--version"],
        env=os.environ | {"POPSIM_TARGETS": targets},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode != 0
    assert f"POPSIM_TARGETS={targets}: " in result.stderr
    assert message in result.stderr


@pytest.fixture
def setup_functions(monkeypatch):
    """Return the definitions of setup.py, without a build."""
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    return runpy.run_path(str(SETUP))


COMMAND = f"[3/74] c++ -MMD -I/include -c {SETUP.parent}/csrc/base/x.cpp -o /tmp/x.o -std=c++20"


FIRST = "\r\033[K"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (f"{COMMAND}\n", "[3/74] csrc/base/x.cpp"),
        (f"{COMMAND} -DPOPSIM_KERNELS=popsim_kernels_avx2\n", "[3/74] csrc/base/x.cpp (avx2)"),
        ("csrc/base/x.cpp:3: error: expected\n", "csrc/base/x.cpp:3: error: expected\n"),
        ("FAILED: /tmp/x.o\n", "FAILED: /tmp/x.o\n"),
    ],
)
def test_a_terminal_shows_one_file_in_the_place_of_the_other(line, shown, setup_functions):
    assert setup_functions["short_line"](line, True) == FIRST + shown
    is_file = shown.startswith("[")
    assert setup_functions["short_line"](line, False) == ("" if is_file else shown)
    assert setup_functions["short_line"]("ninja: no work to do.\n", True) == ""


@pytest.mark.parametrize("verbose", ["", "1"])
def test_what_child_processes_write_is_one_line(verbose, setup_functions, monkeypatch, capfd):
    monkeypatch.setenv("V", verbose)
    with setup_functions["short_output"]("Compiling"):
        subprocess.run(["echo", f"{COMMAND}\n{COMMAND}\nFAILED"], check=True)
    os.write(1, b"behind\n")
    expected = f"{COMMAND}\n{COMMAND}" if verbose else "Compiling"
    assert capfd.readouterr().out == f"{expected}\nFAILED\nbehind\n"


@pytest.mark.skipif(sys.platform != "linux", reason="the targets are those of x86-64 on Linux")
@pytest.mark.parametrize("asked", ["own", "all", ""])
def test_a_build_is_for_this_processor_or_for_all(asked, setup_functions, monkeypatch):
    monkeypatch.setenv("POPSIM_TARGETS", asked)
    chosen = setup_functions["chosen_targets"]()
    if not setup_functions["HAS_TARGETS"]:
        assert chosen == ["baseline"]
    elif asked == "own":
        # The kernels of the matrix units belong to those of AVX-512.
        highest = max(build_info().usable_targets, key=["sse4", "avx2", "avx512", "amx"].index)
        assert chosen == [highest.replace("amx", "avx512")]
    else:
        assert chosen == ["sse4", "avx2", "avx512"]


def test_the_targets_of_a_build_stand_in_a_header(setup_functions):
    header = setup_functions["list_targets"](["sse4", "avx2"])
    assert '#define POPSIM_TARGETS "sse4,avx2,"' in header
    assert "#define POPSIM_FOR_EACH_TARGET(X) X(sse4) X(avx2)" in header
