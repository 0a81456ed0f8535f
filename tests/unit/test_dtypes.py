"""The table of dtypes: those of the device, and those of results."""

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch.dtypes import INPUTS, dtype_name, held_dtype, returned_dtype
from popsim_torch.enums import OutputMode

SMALL = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32]


@pytest.mark.parametrize("dtype", [*SMALL, torch.int64, torch.float16, torch.float32], ids=str)
def test_what_the_device_holds_as_it_is(dtype):
    assert held_dtype(dtype) is dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_what_the_device_holds_as_float(dtype):
    assert held_dtype(dtype) is torch.float32
    assert returned_dtype(dtype) is torch.float32


@pytest.mark.parametrize("dtype", [*SMALL, torch.float16, torch.float32], ids=str)
def test_what_comes_back_as_it_is(dtype):
    assert returned_dtype(dtype) is dtype


def test_wide_integers_come_back_narrow():
    assert returned_dtype(torch.int64) is torch.int32


@pytest.mark.parametrize("dtype", [*SMALL, torch.int64], ids=str)
def test_sums_count(dtype):
    assert returned_dtype(dtype, OutputMode.Sum) is torch.int32


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_sums_of_numbers_keep_their_type(dtype):
    assert returned_dtype(dtype, OutputMode.Sum) is dtype


def test_names():
    assert dtype_name(torch.bfloat16) == "bfloat16"


class Function(torch.nn.Module):
    def forward(self, x):
        return x


@pytest.mark.parametrize("dtype", INPUTS, ids=str)
def test_a_round_trip_of_every_input_type(dtype):
    options = poptorch.Options().showCompilationProgressBar(False)
    x = torch.tensor([0, 1, 1, 0]).to(dtype)
    y = poptorch.inferenceModel(Function(), options)(x)
    assert y.dtype is returned_dtype(dtype)
    assert torch.equal(y, x.to(y.dtype))
