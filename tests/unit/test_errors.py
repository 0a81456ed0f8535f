"""The exception classes: their bases, attributes, texts and copies."""

import copy
import pickle

import pytest

from popsim_torch import errors
from popsim_torch.errors import Error

DUAL = {
    "UsageAssertionError": AssertionError,
    "UsageAttributeError": AttributeError,
    "UsageKeyError": KeyError,
    "UsageRuntimeError": RuntimeError,
    "UsageTypeError": TypeError,
    "UsageValueError": ValueError,
}

ALL = [*DUAL, "Error", "RecoverableError", "UnrecoverableError", "InternalError"]


def test_error_holds_message_type_and_location():
    error = Error("no loss", error_type="poptorch_cpp_error", location="[0] forward")
    assert (error.message, error.type, error.location) == (
        "no loss",
        "poptorch_cpp_error",
        "[0] forward",
    )


def test_error_prints_its_type_and_message():
    assert str(Error("no loss")) == "'poptorch_py_error': no loss"


def test_error_prints_its_location_on_lines_of_its_own():
    error = Error("no loss", location="[0] forward\n[1] model")
    assert str(error).endswith(": no loss\nError raised in:\n[0] forward\n[1] model")


def test_recoverable_error_holds_and_prints_its_recovery_action():
    error = errors.RecoverableError("link down", "LINK_RESET")
    assert error.recovery_action == "LINK_RESET"
    assert str(error) == "'poptorch_py_error': link down\nRecovery action: LINK_RESET"


@pytest.mark.parametrize("name", ["RecoverableError", "UnrecoverableError", "InternalError"])
def test_special_errors_are_errors(name):
    assert issubclass(getattr(errors, name), Error)


def test_config_file_error_is_a_direct_exception():
    assert errors.ConfigFileError.__bases__ == (Exception,)


def test_internal_error_asks_for_a_report():
    text = str(errors.InternalError("stage 3 is missing"))
    assert "stage 3 is missing" in text
    assert "Please report it" in text


def test_popsim_error_is_the_same_class():
    assert errors.PopsimError is Error


@pytest.mark.parametrize("name", DUAL)
def test_usage_error_is_an_error_and_the_built_in(name):
    cls = getattr(errors, name)
    assert issubclass(cls, Error)
    assert issubclass(cls, DUAL[name])


@pytest.mark.parametrize("name", DUAL)
def test_usage_error_prints_its_message_alone(name):
    assert str(getattr(errors, name)("needs 'x'")) == "needs 'x'"


@pytest.mark.parametrize("name", ALL)
def test_error_survives_pickling(name):
    error = getattr(errors, name)("broken", location="[0] here")
    twin = pickle.loads(pickle.dumps(error))
    assert type(twin) is type(error)
    assert (twin.args, twin.message, twin.location) == ((str(error),), "broken", "[0] here")
    assert str(twin) == str(error)


def test_recovery_action_survives_pickling():
    error = errors.RecoverableError("link down", "LINK_RESET")
    assert pickle.loads(pickle.dumps(error)).recovery_action == "LINK_RESET"


def test_error_survives_copying():
    error = Error("no loss", error_type="popart_exception")
    assert copy.copy(error).type == "popart_exception"


def test_create_poptorch_error_returns_an_error():
    error = errors.createPoptorchError("oops")
    assert type(error) is Error
    assert error.message == "oops"


def test_the_argument_of_an_error_is_its_whole_text():
    error = Error("no loss", location="[0] forward")
    assert error.args == ("'poptorch_py_error': no loss\nError raised in:\n[0] forward",)
    assert errors.UsageValueError("needs 'x'").args == ("needs 'x'",)


def test_an_error_of_the_back_end_says_where_it_was_found():
    error = errors.RecoverableError(
        "link down", "LINK_RESET", error_type="popart_exception", source="a.cpp:3", location="[0] x"
    )
    assert str(error) == (
        "In a.cpp:3: 'popart_exception': link down\nRecovery action: LINK_RESET\n"
        "Error raised in:\n[0] x"
    )
    assert pickle.loads(pickle.dumps(error)).source == "a.cpp:3"


def test_a_long_message_is_written_to_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = "\n".join(f"line {number}" for number in range(81))
    error = Error(message)
    path = tmp_path / "poptorch_error.log"
    assert path.read_text() == f"{message}\n"
    assert error.message == f"line 0 ... See {path} for the whole message of 81 lines."
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_message_of_80_lines_is_not_long(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = "\n" * 79
    assert Error(message).message == message
    assert list(tmp_path.iterdir()) == []


def test_a_long_message_that_cannot_be_written_is_kept(tmp_path, monkeypatch):
    (tmp_path / "poptorch_error.log").mkdir()
    monkeypatch.chdir(tmp_path)
    message = "x\n" * 100
    assert Error(message).message == message


def test_example_names_prefers_those_with_words_in_common():
    names = ["input", "fc1.weight", "Gradient___fc2.bias", "loss"]
    assert errors.example_names("dense.weight.grad", names) == ["fc1.weight"]


def test_example_names_of_nothing_alike_are_from_all_over_the_list():
    names = [f"n{number}" for number in range(20)]
    assert errors.example_names("?", names) == ["n0", "n4", "n8", "n12", "n16"]
    assert errors.example_names("?", []) == []


def test_closest_names_finds_a_misspelt_name():
    names = ["fc1.weight", "Gradient___fc2.bias", "loss"]
    assert errors.closest_names("Gradient___fc2.bais", names) == ["Gradient___fc2.bias"]


def test_closest_names_returns_the_best_first_and_no_more_than_the_limit():
    names = ["weight0", "weight12", "weight1", "weight2"]
    assert errors.closest_names("weight1", names, limit=2)[0] == "weight1"
    assert len(errors.closest_names("weight1", names, limit=2)) == 2


def test_closest_names_is_empty_when_nothing_is_alike():
    assert errors.closest_names("loss", ["Conv:0", "xyz"]) == []


def test_not_supported_yet_says_what_came_and_what_to_do():
    error = errors.not_supported_yet(
        "Options.replicationFactor(2)", "replication", "Set it to 1.", "it runs one replica"
    )
    assert error.message == (
        "Options.replicationFactor(2): replication is not supported by this version of "
        "popsim_torch yet (it runs one replica). Set it to 1."
    )
