"""Environment variables, and what programs ask about the machine."""

import pytest

import popsim_torch as poptorch
from popsim_torch import environment


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("POPTORCH_IPU_MODEL", "yes", "0 or 1"),
        ("POPTORCH_SMALL_IPU_MODEL", "2", "0 or 1"),
        ("POPTORCH_IPU_MODEL_VERSION", "ipu3", "ipu1, ipu2, ipu21"),
        ("POPTORCH_WAIT_FOR_IPU", "true", "0 or 1"),
        ("POPTORCH_EXPORT_PROTO_AS_BINARY", "x", "0 or 1"),
        ("POPTORCH_MAX_GRAPH_LEN", "-3", "a number"),
        ("POPART_LOG_LEVEL", "LOUD", "TRACE, DEBUG, INFO, WARN, ERR, CRITICAL, OFF"),
        ("POPLAR_ENGINE_OPTIONS", "{", "a JSON object"),
        ("POPLAR_ENGINE_OPTIONS", "[" * 100_000, "a JSON object"),
        ("PVTI_OPTIONS", "[1]", "a JSON object"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_allowed(variable, value, allowed, monkeypatch):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=variable) as caught:
        environment.check()
    assert repr(value) in str(caught.value)
    assert f"It has to be {allowed}" in str(caught.value)


def test_right_values_are_taken(monkeypatch):
    monkeypatch.setenv("POPTORCH_IPU_MODEL", "1")
    monkeypatch.setenv("POPTORCH_WAIT_FOR_IPU", "0")
    monkeypatch.setenv("POPTORCH_MAX_GRAPH_LEN", "100")
    monkeypatch.setenv("POPART_LOG_LEVEL", "DEBUG")
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", '{"autoReport.all": "true"}')
    monkeypatch.setenv("PVTI_OPTIONS", "")
    environment.check()
    assert environment.json_object("POPLAR_ENGINE_OPTIONS") == {"autoReport.all": "true"}
    assert environment.json_object("PVTI_OPTIONS") == {}
    assert (environment.flag("POPTORCH_IPU_MODEL"), environment.flag("POPTORCH_WAIT_FOR_IPU")) == (
        True,
        False,
    )


@pytest.fixture
def hardware(monkeypatch):
    for name in ("POPTORCH_IPU_MODEL", "POPTORCH_SMALL_IPU_MODEL", "POPTORCH_IPU_MODEL_VERSION"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_there_are_64_ipus(hardware):
    assert poptorch.ipuHardwareIsAvailable() is True
    assert poptorch.ipuHardwareIsAvailable(num_ipus=64) is True
    assert poptorch.ipuHardwareIsAvailable(65) is False


def test_the_number_of_ipus_is_an_int():
    with pytest.raises(TypeError, match="must be an int, got str"):
        poptorch.ipuHardwareIsAvailable("4")


@pytest.mark.parametrize(("value", "version"), [("", 2), ("ipu1", 1), ("ipu2", 2), ("ipu21", 21)])
def test_the_version_of_the_hardware(value, version, hardware):
    hardware.setenv("POPTORCH_IPU_MODEL_VERSION", value)
    assert poptorch.ipuHardwareVersion() == version


@pytest.mark.parametrize("variable", ["POPTORCH_IPU_MODEL", "POPTORCH_SMALL_IPU_MODEL"])
def test_the_software_model_is_no_hardware(variable, hardware):
    hardware.setenv(variable, "1")
    assert poptorch.ipuHardwareIsAvailable() is False
    with pytest.raises(AssertionError, match="No IPU hardware available"):
        poptorch.ipuHardwareVersion()
    hardware.setenv(variable, "0")
    assert poptorch.ipuHardwareIsAvailable() is True
