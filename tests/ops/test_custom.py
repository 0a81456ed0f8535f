"""Custom operators whose kernels are in libraries: values, gradients, threads, what they may be."""

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import popsim_torch as poptorch
from popsim_torch import _native, ir
from popsim_torch.custom_ops.attributes import packed
from popsim_torch.passes.native_graph import to_native
from tests.custom_ops import library
from tests.custom_ops.library import DOMAIN
from tests.ops.one_op import OneOp, run_op
from tests.ops.test_thread_invariance import assert_invariant
from tests.options import make_options


@pytest.fixture(autouse=True, scope="module")
def loaded_library():
    library.loaded()
    _native.look_for_custom_ops([])


def described(name, version=1, **attributes):
    return {"domain": DOMAIN, "name": name, "version": version, **packed(attributes)}


F32, F16 = torch.float32, torch.float16
HALF_TOLERANCE = {"rtol": 2e-3, "atol": 1e-3}


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_values(dtype):
    x = torch.randn(5, 7).to(dtype)
    (y,) = run_op("custom", [x], [(dtype, x.shape)], **described("Cube", scale=2.0))
    tolerance = HALF_TOLERANCE if dtype == F16 else {}
    torch.testing.assert_close(y, 2 * x**3, **tolerance)


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_the_gradient_reads_inputs_outputs_and_gradients(dtype):
    x, gradient = torch.randn(2, 5, 7).to(dtype)
    attributes = {**described("Cube"), "gradient_of": 1}
    (found,) = run_op("custom", [x, x**3, gradient], [(dtype, x.shape)], **attributes)
    tolerance = HALF_TOLERANCE if dtype == F16 else {}
    torch.testing.assert_close(found, 3 * x**2 * gradient, **tolerance)


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
def test_the_number_of_threads_changes_no_bit(dtype):
    x = torch.randn(901, 703).to(dtype)
    assert_invariant(
        lambda: OneOp("custom", [x], [(dtype, x.shape)], described("Cube", scale=0.3)).run
    )


def test_several_inputs_and_outputs_with_and_without_gradients():
    x, factors = torch.randn(4, 3), torch.tensor([2, 0, -1, 5], dtype=torch.int32)
    y, doubled, sums = run_op(
        "custom",
        [x, factors],
        [(F32, (4, 3)), (torch.int32, (4,)), (F32, (4,))],
        **described("ScaledRows", 2),
    )
    torch.testing.assert_close(y, factors[:, None] * x)
    assert torch.equal(doubled, 2 * factors)
    torch.testing.assert_close(sums, x.sum(1))


def test_all_kinds_of_attributes_reach_the_kernel():
    found = library.run(
        "Told",
        examples=[torch.empty(7)],
        attributes={
            "whole": -7,
            "number": 0.5,
            "word": "four",
            "wholes": (1, 2**40),
            "numbers": [0.25, 1e30],
            "words": ["a", "bcd"],
        },
    )
    assert found[0].tolist() == pytest.approx([-7, 0.5, 4, 2.0**40, 1e30, 3, 0])


def test_an_attribute_that_is_not_given_is_an_error_that_names_it():
    with pytest.raises(poptorch.Error, match=r"Told:0.*attribute 'whole' is not given"):
        library.run("Told", examples=[torch.empty(7)])


def test_kernels_see_contiguous_tensors_of_the_device():
    wide = torch.randn(6, 4)

    class Model(torch.nn.Module):
        def forward(self, x, factors):
            y, _, _ = poptorch.custom_op(
                [x.t()[1:], factors[::2]],
                *("ScaledRows", DOMAIN, 2),
                [torch.empty(3, 6), torch.empty(3, dtype=torch.int64), torch.empty(3)],
            )
            return y

    factors = torch.arange(6)  # int64, which is int32 on the device
    found = poptorch.inferenceModel(Model(), make_options())(wide, factors)
    torch.testing.assert_close(found, wide.t()[1:] * factors[::2, None])


def test_work_is_what_the_operator_says():
    graph = ir.Graph()
    x = graph.add_tensor(ir.TensorKind.INPUT, F32, (6, 5))
    y = graph.add_tensor(ir.TensorKind.VALUE, F32, (6, 5))
    slope = graph.add_tensor(ir.TensorKind.VALUE, F32, (6, 5))
    add = graph.add_op
    add("custom", [x], [y], described("Cube"), phase=ir.Phase.FORWARD, name="y")
    backward = {**described("Cube"), "gradient_of": 1}
    add("custom", [x, y, x], [slope], backward, phase=ir.Phase.FORWARD, name="slope")
    add("custom", [x], [y], described("CubeWithoutGradient"), phase=ir.Phase.FORWARD, name="y")

    def totals(op):
        work = _native.work_of(to_native(graph), op)
        return sum(part.flops for part in work), sum(part.bytes for part in work)

    assert [totals(op) for op in range(3)] == [(90, 240), (120, 77), (0, 240)]


@pytest.mark.parametrize(
    ("fault", "message"),
    [("a negative cost", "is -1: it must be"), ("throws in its cost", "cost of .*not countable")],
)
def test_a_wrong_cost_is_an_error(fault, message):
    graph = ir.Graph()
    x = graph.add_tensor(ir.TensorKind.INPUT, F32, (6,))
    y = graph.add_tensor(ir.TensorKind.VALUE, F32, (6,))
    attributes = described("Faulty", fault=fault)
    graph.add_op("custom", [x], [y], attributes, phase=ir.Phase.FORWARD, name="y")
    with pytest.raises(poptorch.Error, match=message), _native.translated_errors():
        _native.work_of(to_native(graph), 0)


def test_half_of_the_header_rounds_as_numpy_does():
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    finite = halves[np.isfinite(halves)]
    between = (finite[:-1] + finite[1:]) / 2
    up, down = np.nextafter(between, np.float32(9e9)), np.nextafter(between, np.float32(-9e9))
    x = np.concatenate([halves, between, up, down, np.float32([65519, 65520, 1e30, 1e-30])])
    y = np.empty_like(x)
    floats = ctypes.POINTER(ctypes.c_float)
    ctypes.CDLL(str(library.loaded())).to_half_and_back(
        x.ctypes.data_as(floats), y.ctypes.data_as(floats), ctypes.c_int64(x.size)
    )
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(y, expected)


# --- What is wrong is refused before it runs ---


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"name": "Cubes"}, "operator popsim_tests::Cubes version 1 exists"),
        ({"version": 2}, "operator popsim_tests::Cube version 2 exists"),
        ({"attributes": ["float - scale"]}, "attribute 'scale' has all its values"),
        ({"floats": [1.0]}, "each value belongs to an attribute"),
        ({"attributes": ["scale"]}, "layout 'scale' has a type, a count and a name"),
        ({"attributes": ["half - scale"]}, "layout 'half - scale' has the type int"),
        ({"attributes": ["float 99999999999 scale"]}, "has a count"),
        ({"gradient_of": 1}, "input 1 is present"),
        ({"gradient_of": 3}, "the op has the 3 inputs of the operator"),
        ({"name": "CubeWithoutGradient", "gradient_of": 1}, "the operator has a gradient"),
    ],
)
def test_ops_that_programs_may_not_have(change, rule):
    x = torch.randn(3)
    with pytest.raises(poptorch.Error, match=rule):
        run_op("custom", [x], [(F32, (3,))], **{**described("Cube"), **change})


def test_operands_have_to_be_contiguous_and_of_types_of_the_device():
    with pytest.raises(poptorch.Error, match="input 0 is contiguous"):
        run_op("custom", [torch.randn(4, 3).t()], [(F32, (3, 4))], **described("Cube"))
    with pytest.raises(poptorch.Error, match="input 0 'inputs' is not int64"):
        run_op("custom", [torch.arange(3)], [(torch.int64, (3,))], **described("Cube"))


# --- Kernels that touch what is not theirs ---


def faulty(fault):
    net = library.OneCall("Faulty", {"fault": fault})
    return poptorch.inferenceModel(net, make_options())(torch.ones(4))[0]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("writes after its output", r"Faulty:0.*the kernel writes after the memory of output 0"),
        ("writes to its input", r"Faulty:0.*the kernel writes to input 0"),
    ],
)
def test_guards_find_what_a_kernel_may_not_write(fault, message, monkeypatch):
    monkeypatch.setenv("POPSIM_CHECK_CUSTOM_OPS", "1")
    with pytest.raises(poptorch.Error, match=message):
        faulty(fault)
    assert faulty("").tolist() == [0] * 4


def test_guards_change_no_value(monkeypatch):
    x, factors = torch.randn(3, 4), torch.tensor([2, 0, -1], dtype=torch.int32)
    examples = [x, factors, torch.empty(3)]
    plain = library.run("ScaledRows", x, factors, examples=examples, version=2)
    monkeypatch.setenv("POPSIM_CHECK_CUSTOM_OPS", "1")
    guarded = library.run("ScaledRows", x, factors, examples=examples, version=2)
    assert all(map(torch.equal, plain, guarded))


UNDER_ASAN = "libasan" in os.environ.get("LD_PRELOAD", "")
PROGRAM = """
import ctypes, sys, torch
import popsim_torch as poptorch
ctypes.CDLL(sys.argv[1])
class Model(torch.nn.Module):
    def forward(self, x):
        y = x + 1
        (z,) = poptorch.custom_op([y], "Faulty", "popsim_tests", 1, [y], {"fault": sys.argv[2]})
        return z + 1
options = poptorch.Options().showCompilationProgressBar(False)
print(poptorch.inferenceModel(Model(), options)(torch.ones(5)).tolist())
"""


@pytest.mark.skipif(not UNDER_ASAN, reason="only a build with AddressSanitizer closes its memory")
@pytest.mark.parametrize("fault", ["", "writes after its output", "reads in front of its input"])
def test_the_sanitizer_stops_a_kernel_that_leaves_its_operands(fault, tmp_path):
    built = str(Path(poptorch.__file__).parents[1])
    path = library.compiled("library.cpp", "sanitized", "-std=c++17", "-fsanitize=address")
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path), fault],
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": built, "ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    if not fault:
        assert result.stdout == "[1.0, 1.0, 1.0, 1.0, 1.0]\n", result.stderr[-3000:]
    else:
        assert result.returncode != 0
        # The second lies at the start of all memory.
        found = "ERROR: AddressSanitizer: (use-after-poison|heap-buffer-overflow)"
        assert re.search(found, result.stderr)
