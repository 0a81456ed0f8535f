"""Operators are found whatever code loads their library, and whenever."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch import _native
from tests.custom_ops import library
from tests.custom_ops.library import DOMAIN, OneCall
from tests.options import make_options

ROOT = Path(__file__).parents[3]
X = torch.arange(4, dtype=torch.int32)
PROGRAM = """
import ctypes, sys, torch
{before}
import popsim_torch as poptorch
{after}
class Model(torch.nn.Module):
    def forward(self, x):
        return poptorch.custom_op([x], "Copied", "popsim_tests.c", 1, example_outputs=[x])[0]
options = poptorch.Options().showCompilationProgressBar(False)
print(poptorch.inferenceModel(Model(), options)(torch.arange(4, dtype=torch.int32)).tolist())
"""
LOADING = {
    "before the import, by ctypes": ("ctypes.cdll.LoadLibrary(sys.argv[1])", ""),
    "by ctypes": ("", "ctypes.cdll.LoadLibrary(sys.argv[1])"),
    "for all to see": ("", "ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)"),
    "by torch, before": ("torch.ops.load_library(sys.argv[1])", ""),
    "by torch, twice": (
        "torch.ops.load_library(sys.argv[1])",
        "torch.ops.load_library(sys.argv[1]); ctypes.CDLL(sys.argv[1])",
    ),
}

IN_SHORT = ("before the import, by ctypes",)


def copied(name="Copied", attributes=None, x=X):
    return library.run(name, x, attributes=attributes, domain="popsim_tests.c")[0]


@pytest.mark.parametrize(
    "how",
    [pytest.param(how, marks=[] if how in IN_SHORT else pytest.mark.slow) for how in LOADING],
)
def test_a_library_may_be_loaded_in_any_way(how):
    path = library.compiled("plain.c", "alone", "-std=c99", "-DADDED=3")
    before, after = LOADING[how]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)])
    }
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before, after=after), str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        cwd=path.parent,  # not in a folder that contains another version of the package
    )
    assert result.stdout == "[3, 4, 5, 6]\n", result.stderr


def test_a_library_that_is_loaded_later_is_found():
    with pytest.raises(poptorch.Error, match=r"no operator popsim_tests\.c::Late version 1\."):
        copied("Late")
    ctypes.CDLL(str(library.compiled("plain.c", "late", '-DNAME="Late"', "-DADDED=1")))
    assert copied("Late").tolist() == [1, 2, 3, 4]


def test_a_library_may_be_loaded_by_torch_and_twice():
    path = library.compiled("plain.c", "by_torch", '-DNAME="ByTorch"', "-DADDED=2")
    torch.ops.load_library(path)
    torch.ops.load_library(path)
    ctypes.CDLL(str(path))
    assert copied("ByTorch").tolist() == [2, 3, 4, 5]


def test_the_last_one_counts_and_models_keep_the_one_that_they_were_compiled_with():
    model = poptorch.inferenceModel(OneCall("Anew", domain="popsim_tests.c"), make_options())
    for added in (1, 2):
        name = f"anew{added}"
        ctypes.CDLL(str(library.compiled("plain.c", name, '-DNAME="Anew"', f"-DADDED={added}")))
        assert copied("Anew").tolist() == [added + i for i in range(4)]
        assert model(X)[0].tolist() == [1, 2, 3, 4]

    @poptorch.register_custom_op("Anew", domain="popsim_tests.c")
    def anew(x):
        return -x

    assert copied("Anew").tolist() == [0, -1, -2, -3]
    assert model(X)[0].tolist() == [1, 2, 3, 4]


def test_a_library_for_another_version_of_the_header_is_left_out_and_named():
    path = library.compiled("plain.c", "other_version", '-DNAME="Versioned"', "-DVERSION=99")
    ctypes.CDLL(str(path))
    with pytest.raises(poptorch.Error, match=r"other_version\.so was compiled with version 99"):
        copied("Versioned")


def test_an_operator_of_a_library_needs_a_shape_rule():
    ctypes.CDLL(str(library.compiled("plain.c", "bare", '-DNAME="Bare"', "-DSHAPES=0")))
    with pytest.raises(poptorch.Error, match=r"bare\.so has an operator 'Bare' without a shape"):
        copied("Bare")


def test_a_function_in_c_says_what_is_wrong_or_does_not():
    ctypes.CDLL(str(library.compiled("plain.c", "plain")))
    with pytest.raises(poptorch.Error, match=r"shape rule of .*::Copied .*: inputs have one axis"):
        copied(x=X.float())
    with pytest.raises(poptorch.Error, match=r"kernel of .*::Copied .*: it gives no reason"):
        copied(attributes={"a": 1})
    assert torch.equal(copied(), X)


def test_an_unknown_operator_names_those_that_are_like_it():
    library.loaded()
    with pytest.raises(poptorch.Error) as caught:
        library.run("cube", torch.ones(2))
    message = caught.value.message
    assert "there is no operator popsim_tests::cube version 1" in message
    assert "Closest: popsim_tests::Cube version 1" in message
    assert "popsim_tests::ScaledRows version 2" in message
    assert "register_custom_op" in message


@pytest.mark.parametrize("change", [{"name": "Cubes"}, {"domain": "x"}, {"version": 3}])
def test_name_domain_and_version_have_to_be_those(change):
    library.loaded()
    call = {"name": "Cube", "domain": DOMAIN, "version": 1, **change}
    name = call.pop("name")
    with pytest.raises(poptorch.Error, match="there is no operator"):
        library.run(name, torch.ones(2), **call)


def test_a_library_that_is_named_as_well_is_there_once():
    path = str(library.loaded())
    for _ in range(2):
        assert path not in " ".join(_native.look_for_custom_ops([path]))
    names = [(op.domain, op.name, op.version) for op in _native.custom_ops()]
    assert names.count((DOMAIN, "Cube", 1)) == 1
    assert names == sorted(set(names))


def test_a_file_that_is_no_library_is_passed_over(tmp_path):
    (tmp_path / "text.so").write_text("text")
    before = len(_native.custom_ops())
    _native.look_for_custom_ops([str(tmp_path / "text.so"), str(tmp_path / "nothing.so"), ""])
    assert len(_native.custom_ops()) == before
