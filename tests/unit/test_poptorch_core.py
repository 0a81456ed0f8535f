"""The names that programs take from PopTorch's compiled module, and from ``testing``."""

import re

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch import poptorch_core
from popsim_torch.poptorch_core import TestErrorType

CASES = {
    "Poptorch": (poptorch.Error, "poptorch_cpp_error"),
    "Popart": (poptorch.Error, "popart_exception"),
    "PopartInternal": (poptorch.Error, "popart_internal_exception"),
    "Poplibs": (poptorch.Error, "poplibs_exception"),
    "PoplarUnrecoverable": (poptorch.UnrecoverableError, "poplar_unrecoverable_runtime_error"),
    "PoplarUnknown": (poptorch.Error, "poplar_unknown_runtime_error"),
    "PoplarRecoverableFullReset": (poptorch.RecoverableError, "poplar_recoverable_runtime_error"),
    "PoplarLinkError": (poptorch.Error, "poplar_link_error"),
}


def test_the_members_are_those_of_poptorch():
    assert list(TestErrorType.__members__) == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_errors_can_be_tried(name):
    kind, error_type = CASES[name]
    with pytest.raises(kind) as caught:
        poptorch_core._throwTestError(TestErrorType[name])
    error = caught.value
    assert type(error) is kind
    assert error.type == error_type
    assert error.location
    first = re.escape(f"'{error_type}': {error.message}")
    assert re.match(rf"In poptorch_core\.py:\d+: {first}\n", str(error))
    assert str(error).endswith(f"Error raised in:\n{error.location}")
    assert error.args == (str(error),)
    if kind is poptorch.RecoverableError:
        assert error.recovery_action == "FULL_RESET"
        assert "FULL_RESET" in str(error)


def test_a_link_error_ends_with_what_the_linker_said():
    with pytest.raises(poptorch.Error) as caught:
        poptorch_core._throwTestError(TestErrorType.PoplarLinkError)
    assert caught.value.message.endswith("-foo")


def test_the_classes_are_the_packages():
    assert poptorch_core.Error is poptorch.Error
    assert poptorch_core.RecoverableError is poptorch.RecoverableError


def test_options_can_be_validated(caplog):
    poptorch.setLogLevel("DEBUG")
    options = poptorch.Options().outputMode(poptorch.OutputMode.All).deviceIterations(3)
    try:
        assert poptorch_core._validateOptions(options.toDict()) is None
    finally:
        poptorch.setLogLevel("WARN")
    lines = [record.getMessage() for record in caplog.records if record.name == "poptorch:cpp"]
    assert "poptorch.Options set device_iterations to value 3" in lines
    with pytest.raises(poptorch.Error, match="Unknown int option nothing"):
        poptorch_core._validateOptions({"nothing": 3})


ONE = torch.ones(2)
NEAR = ONE + 1e-7


@pytest.mark.parametrize(
    ("ref", "other", "close"),
    [
        (ONE, NEAR, True),
        (ONE, ONE + 1, False),
        ((ONE, [ONE, (ONE,)]), (NEAR, [NEAR, (NEAR,)]), True),
        ((ONE, [ONE, ONE]), (ONE, [ONE, ONE + 1]), False),
        ([ONE], (ONE,), False),
        ([ONE, ONE], [ONE], False),
        ([ONE], ONE, False),
        (3, 3, True),
        (3, 4, False),
    ],
)
def test_results_are_compared_with_their_structure(ref, other, close):
    assert poptorch.testing.allclose(ref, other) is close


def test_tolerances_are_passed_on():
    assert poptorch.testing.allclose([ONE], [ONE * 1.1], rtol=0.2)
    assert not poptorch.testing.allclose([ONE], [ONE * 1.1], rtol=0.01)
    nan = torch.tensor([float("nan")])
    assert poptorch.testing.allclose((nan,), (nan,), equal_nan=True)
    assert not poptorch.testing.allclose((nan,), (nan,))


def test_the_version_can_be_compared():
    assert re.fullmatch(r"\d+\.\d+\.\d+-\w+", poptorch.__version__)


def test_modules_are_printed_with_their_blocks(capsys):
    net = torch.nn.Sequential(poptorch.BeginBlock(torch.nn.ReLU(), "first", ipu_id=0))
    poptorch.print(net, 3, sep="|")
    assert capsys.readouterr().out == f"{poptorch.module_repr(net)}|3\n"
    assert "BeginBlock(" in poptorch.module_repr(net)
