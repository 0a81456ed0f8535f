"""Anchor requests: where their mode comes from and how many values each mode returns."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popsim_torch.anchors import AnchorRequest, check_return_mode, num_returned
from popsim_torch.enums import OutputMode
from popsim_torch.errors import Error, InternalError

UNDECIDED = ["fc.weight", True, OutputMode.Default, 1]


def test_request_without_a_mode_takes_the_mode_of_the_model():
    request = AnchorRequest.of("w", UNDECIDED, OutputMode.All, 1)
    assert request == AnchorRequest("w", "fc.weight", OutputMode.All, 1)


def test_request_without_a_mode_takes_the_period_of_every_n():
    assert AnchorRequest.of("w", UNDECIDED, OutputMode.EveryN, 4).period == 4


def test_request_ignores_the_period_of_a_model_with_another_mode():
    assert AnchorRequest.of("w", UNDECIDED, OutputMode.Sum, 4).period == 1


def test_request_with_a_mode_keeps_it():
    entry = ["fc.weight", False, int(OutputMode.EveryN), 2]
    request = AnchorRequest.of("w", entry, OutputMode.Final, 1)
    assert request == AnchorRequest("w", "fc.weight", OutputMode.EveryN, 2)


def test_mode_of_the_model_must_be_known():
    with pytest.raises(InternalError, match="anchor 'w'"):
        AnchorRequest.of("w", UNDECIDED, OutputMode.Default, 1)


@pytest.mark.parametrize("entry", [None, "fc.weight", ["fc.weight", True, 9, 1], ["fc.weight"]])
def test_an_entry_that_is_no_request_is_refused(entry):
    with pytest.raises(Error, match=r"anchored_tensors\['w'\] is .*call Options\.anchorTensor"):
        AnchorRequest.of("w", entry, OutputMode.All, 1)


@pytest.mark.parametrize(
    ("mode", "period", "expected"),
    [
        (OutputMode.All, 1, 6 * 4 * 2),
        (OutputMode.Final, 1, 2),
        (OutputMode.Sum, 1, 2),
        (OutputMode.EveryN, 3, 2 * 4 * 2),
        (OutputMode.EveryN, 6, 1 * 4 * 2),
        (OutputMode.EveryN, 1, 6 * 4 * 2),
    ],
)
def test_number_of_values_returned(mode, period, expected):
    assert num_returned(mode, period, 6, 4, 2) == expected


@given(st.integers(1, 64), st.integers(1, 16), st.integers(1, 8))
def test_every_first_iteration_returns_as_much_as_all(iterations, accumulation, replicas):
    sizes = (iterations, accumulation, replicas)
    assert num_returned(OutputMode.EveryN, 1, *sizes) == num_returned(OutputMode.All, 1, *sizes)


@pytest.mark.parametrize("period", [-1, 0, 4, 7, 12])
def test_period_must_divide_the_device_iterations(period):
    with pytest.raises(Error, match=rf"return period {period} .* does not divide the 6 device"):
        num_returned(OutputMode.EveryN, period, 6, 1, 1)


def test_error_of_a_period_names_the_setter():
    with pytest.raises(Error, match=r"Options\.anchorTensor\('w'\): the return period"):
        num_returned(OutputMode.EveryN, 5, 6, 1, 1, where="Options.anchorTensor('w')")


@pytest.mark.parametrize("mode", [OutputMode.All, OutputMode.Final, OutputMode.Sum])
def test_other_modes_do_not_look_at_the_period(mode):
    check_return_mode(mode, 5, 6, pipelined=True)


def test_every_n_is_refused_in_a_pipeline():
    with pytest.raises(Error, match="EVERYN is not valid for pipelined models"):
        check_return_mode(OutputMode.EveryN, 2, 6, pipelined=True)


def test_number_of_values_needs_a_mode():
    with pytest.raises(InternalError):
        num_returned(OutputMode.Default, 1, 1, 1, 1)
