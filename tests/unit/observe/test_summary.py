"""Statistics agree with exact sums, and the table is as documented, character by character."""

import math

import numpy as np
import pytest
import torch

from popsim_torch.errors import UsageTypeError, UsageValueError
from popsim_torch.observe.summary import (
    epoch_title,
    extended_table,
    step_norms,
    step_title,
    summarise,
    summary_table,
)


def exact(values):
    """Return mean and population deviation of doubles, from correctly rounded sums."""
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))


def test_a_large_mean_costs_no_digits():
    values = torch.rand(10**6, generator=torch.Generator().manual_seed(1)).double() + 1e6
    found = summarise(values)
    # The exact sums of the distances from 1e6, which are exact themselves.
    rest = (values - 1e6).numpy()
    mean = 1e6 + math.fsum(rest) / len(rest)
    middle = mean - 1e6
    std = math.sqrt(math.fsum((rest - middle) ** 2) / len(rest))
    assert found.mean == pytest.approx(mean, rel=1e-15)
    assert found.std == pytest.approx(std, rel=1e-11)
    assert (found.minimum, found.maximum) == (values.min().item(), values.max().item())
    assert found.count == 10**6


def test_float32_with_a_mean_much_larger_than_its_deviation():
    values = torch.randn(200_001, generator=torch.Generator().manual_seed(2)) + 4096
    found = summarise(values)
    mean, std = exact(values.double().tolist())
    assert found.mean == pytest.approx(mean, rel=1e-15)
    assert found.std == pytest.approx(std, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_sums_of_half_precision_do_not_overflow(dtype):
    values = torch.full((100_000,), 60000.0).to(dtype)
    values[::2] = -1
    mean, std = exact(values.double().tolist())
    found = summarise(values)
    assert found.mean == pytest.approx(mean, rel=1e-14)
    assert found.std == pytest.approx(std, rel=1e-14)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64, torch.bool])
def test_integers_and_truth_values(dtype):
    values = torch.tensor([0, 1, 1, 1]).to(dtype)
    found = summarise(values)
    assert (found.mean, found.minimum, found.maximum) == (0.75, 0.0, 1.0)
    assert found.std == pytest.approx(math.sqrt(3) / 4)
    assert (found.zeros, found.subnormals) == (1, 0)


def test_an_array_of_numpy_is_as_good():
    assert summarise(np.arange(5.0)).mean == 2.0


def test_all_elements_of_a_view_count():
    values = torch.arange(24.0).view(2, 3, 4).transpose(0, 2)
    assert summarise(values) == summarise(torch.arange(24.0))


def test_no_elements():
    found = summarise(torch.zeros(0, 3))
    assert math.isnan(found.mean) and math.isnan(found.std) and math.isnan(found.minimum)
    assert (found.count, found.norm, found.nans, found.infs) == (0, 0.0, 0, 0)


def test_one_nan_makes_all_nan_and_is_counted():
    values = torch.ones(200_000)
    values[150_000] = math.nan
    values[7] = math.inf
    found = summarise(values)
    for number in (found.mean, found.std, found.minimum, found.maximum):
        assert math.isnan(number)
    assert (found.nans, found.infs) == (1, 1)


def test_infinities():
    found = summarise(torch.tensor([1.0, math.inf, 2.0]))
    assert (found.mean, found.minimum, found.maximum) == (math.inf, 1.0, math.inf)
    assert math.isnan(found.std)
    assert found.norm == math.inf
    assert (found.nans, found.infs) == (0, 1)


def test_an_infinity_among_many_finite_numbers():
    values = torch.ones(200_000)
    values[150_000] = -math.inf
    found = summarise(values)
    assert (found.mean, found.minimum, found.maximum) == (-math.inf, -math.inf, 1.0)
    values[3] = math.inf
    assert math.isnan(summarise(values).mean)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_subnormals_are_those_of_the_tensors_type(dtype):
    tiny = torch.finfo(dtype).tiny
    values = torch.tensor([0.0, tiny, tiny / 2, -tiny / 4, 1.0], dtype=torch.float64).to(dtype)
    found = summarise(values)
    assert (found.zeros, found.subnormals) == (1, 2)


def test_the_norm():
    values = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert summarise(values + 5).norm == pytest.approx((values + 5).norm().item(), rel=1e-13)


def test_quantiles_are_those_of_numpy():
    values = torch.randn(1001, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    found = summarise(values, (0.0, 0.013, 0.5, 1.0)).quantiles
    expected = np.quantile(values.numpy(), list(found))
    assert list(found.values()) == pytest.approx(expected.tolist(), rel=1e-12)


def test_quantiles_leave_nan_out_and_hold_infinities():
    values = torch.tensor([math.nan, -math.inf, 1.0, math.inf])
    found = summarise(values, (0.0, 0.5, 1.0)).quantiles
    assert found == {0.0: -math.inf, 0.5: 1.0, 1.0: math.inf}
    assert math.isnan(summarise(torch.tensor([math.nan]), (0.5,)).quantiles[0.5])


def test_a_share_above_one_is_refused():
    with pytest.raises(UsageValueError, match=r"from 0 to 1, got 1\.5"):
        summarise(torch.ones(2), (1.5,))


def test_complex_numbers_are_refused():
    with pytest.raises(UsageTypeError, match="complex64"):
        summarise(torch.ones(2, dtype=torch.complex64))


TENSORS = {
    "Dense_128/bias_grad": torch.tensor([-1.0, 0.0, 4.0]),
    "w": torch.tensor([math.nan, 1.0]),
    "v": torch.tensor([-math.inf, 1.0]),
}
# The name column has 19 characters and 5 more; columns are one space apart and padded to the end.
TABLE = [
    "Index Name                     Mean         Std          Minimum      Maximum      NaNs    "
    "infs   ",
    "0     Dense_128/bias_grad      1.000000     2.160247     -1.000000    4.000000     False   "
    "False  ",
    "1     w                        nan          nan          nan          nan          True    "
    "False  ",
    "2     v                        -inf         nan          -inf         1.000000     False   "
    "True   ",
]


def test_the_table_byte_for_byte():
    assert summary_table(TENSORS) == "\n".join(TABLE)


def test_the_title_of_a_step_follows_a_blank_line():
    text = summary_table(TENSORS, step_title(3))
    assert text == "\n".join(["", "Step 3 - Summary Stats", *TABLE])


def test_the_title_of_an_epoch():
    text = summary_table(TENSORS, epoch_title(1))
    assert text == "\n".join(["Epoch 1 - Summary Stats", *TABLE])


def test_a_nest_has_a_line_for_each_tensor():
    text = summary_table({"a": (torch.ones(1), {"b": torch.ones(1)})})
    assert [line.split()[1] for line in text.splitlines()] == ["Name", "a/0", "a/1/b"]


def test_the_extended_table_counts():
    values = torch.tensor([0.0, 1e-40, math.nan, math.inf, 2.0])
    header, row = extended_table({"x": values}).splitlines()
    found = dict(zip(header.split(), row.split(), strict=True))
    counts = {name: found[name] for name in ("NaNs", "infs", "Zeros", "Subnormals")}
    assert counts == {"NaNs": "1", "infs": "1", "Zeros": "1", "Subnormals": "1"}
    assert found["Mean"] == f"{2 / 3:.6g}" and found["Maximum"] == "2"


def test_the_extended_table_keeps_the_digits_of_small_numbers():
    header, row = extended_table({"x": torch.full((4,), 1.25e-7)}).splitlines()
    found = dict(zip(header.split(), row.split(), strict=True))
    assert (found["Mean"], found["50%"], found["Norm"]) == ("1.25e-07", "1.25e-07", "2.5e-07")


def test_the_ratio_is_that_of_one_entry():
    weights = {"fc.weight": torch.full((2, 2), 2.0)}
    updates = {"fc.weight_grad": torch.full((3, 2, 2), 0.5), "other": torch.ones(1)}
    header, *rows = extended_table(updates, weights=weights).splitlines()
    assert header.split()[-1] == "Ratio"
    assert rows[0].split()[-1] == "0.25"
    assert len(rows[1].split()) == len(header.split()) - 1


def test_numbers_that_six_decimals_do_not_show_have_three_digits():
    _, row = summary_table({"x": torch.tensor([1.25e-7, 1.25e-7, 0.5])}).splitlines()
    assert row.split()[4:6] == ["1.25e-07", "0.500000"]
    assert summary_table({"x": torch.zeros(2)}).splitlines()[1].split()[2] == "0.000000"


def test_the_statistics_of_what_is_finite():
    found = summarise(torch.tensor([math.nan, 1.0, 3.0, -math.inf]), (0.5,))
    assert found.finite == summarise(torch.tensor([1.0, 3.0]), (0.5,))
    assert found.finite.finite is None
    assert summarise(torch.tensor([math.nan])).finite.count == 0


def test_each_step_has_a_norm():
    values = torch.tensor([[3.0, 4.0], [6.0, 8.0], [0.0, 1.0]])
    assert step_norms(values).tolist() == [5.0, 10.0, 1.0]
    assert step_norms(torch.tensor([[3.0, 4.0, math.nan]])).tolist() == [5.0]
    assert step_norms(torch.empty(0, 3)).shape == (0,)
    header, row = extended_table({"x": values}, steps=True).splitlines()
    found = dict(zip(header.split(), row.split(), strict=True))
    assert (found["NormFirst"], found["NormLast"], found["NormMax"]) == ("5", "1", "10")


def test_no_overflow_in_the_norm_of_a_step_in_half_precision():
    assert step_norms(torch.full((1, 4), 6e4, dtype=torch.float16))[0].item() == pytest.approx(
        2 * float(torch.tensor(6e4).half())
    )


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_line_is_wider_than_asked(width):
    tensors = {"encoder.layers.11.self_attention.weight_grad" * 2: torch.ones(2), **TENSORS}
    for text in (summary_table(tensors, width=width), extended_table(tensors, width=width)):
        assert max(map(len, text.splitlines())) <= width
        assert "...ayers.11.self_attention.weight_grad"[-12:] in text
    assert all(word in text for word in ("Mean", "Norm", "Subnormals"))


def test_a_terminal_gets_lines_of_its_width(monkeypatch):
    whole = summary_table(TENSORS)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "70")
    assert max(map(len, summary_table(TENSORS).splitlines())) <= 70
    monkeypatch.setenv("COLUMNS", "200")
    assert summary_table(TENSORS) == whole


def test_numbers_that_six_decimals_show_have_them():
    _, row = summary_table({"x": torch.tensor([2.0**-18, 2.0**-18])}).splitlines()
    assert row.split()[2:4] == ["0.000004", "0.000000"]
