"""Products of groups of rows, as mixtures of experts compute them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import popsim_torch as poptorch
from tests.options import make_options

pytestmark = pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="PyTorch has no grouped_mm")

SHAPES = {
    "rows": ((12, 8), (3, 8, 16)),
    "columns": ((3, 8, 16), (16, 12)),
    "inner": ((8, 12), (12, 16)),
}


class Grouped(nn.Module):
    def __init__(self, first, second, dtype=None):
        super().__init__()
        self.first = nn.Parameter(torch.randn(first))
        self.second = nn.Parameter(torch.randn(second))
        self.dtype = dtype

    def forward(self, ends):
        out = F.grouped_mm(self.first, self.second, offs=ends, out_dtype=self.dtype)
        return out, poptorch.identity_loss(out.square(), "mean")


def per_group(first, second, ends):
    """The same one group after the other, in float64."""
    first, second = first.double(), second.double()
    starts = [0, *ends[:-1]]
    slices = [slice(a, b) for a, b in zip(starts, ends, strict=True)]
    if second.dim() == 3:
        return torch.cat([first[part] @ second[i] for i, part in enumerate(slices)])
    if first.dim() == 3:
        return torch.cat([first[i] @ second[:, part] for i, part in enumerate(slices)], dim=1)
    return torch.stack([first[:, part] @ second[part] for part in slices])


@pytest.mark.parametrize("ends", [[4, 8, 12], [0, 5, 12], [12, 12, 12], [1, 1, 12]])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_values_and_gradients(shapes, ends):
    torch.manual_seed(0)
    model = Grouped(*shapes)
    twin = copy.deepcopy(model)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.5)
    training = poptorch.trainingModel(model, make_options(), optimizer)
    out, loss = training(torch.tensor(ends, dtype=torch.int32))
    expected = per_group(twin.first, twin.second, ends)
    expected.square().mean().backward()
    torch.testing.assert_close(out.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss, expected.square().mean().detach().float())
    for new, old in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(new.detach(), (old - 0.5 * old.grad).detach())


def test_other_groups_in_the_next_call():
    model = Grouped(*SHAPES["rows"])
    inference = poptorch.inferenceModel(model, make_options())
    for ends in ([4, 8, 12], [2, 3, 12], [0, 0, 12]):
        out, _ = inference(torch.tensor(ends, dtype=torch.int32))
        expected = per_group(model.first, model.second, ends).float()
        torch.testing.assert_close(out, expected.detach(), rtol=1e-5, atol=1e-5)


def test_rows_behind_the_last_group_are_zeros():
    model = Grouped(*SHAPES["rows"])
    out, _ = poptorch.inferenceModel(model, make_options())(
        torch.tensor([2, 4, 9], dtype=torch.int32)
    )
    assert not out[9:].any()
    torch.testing.assert_close(out[:9], per_group(model.first, model.second, [2, 4, 9]).float())


def test_groups_that_are_not_divided():
    model = Grouped((3, 4, 8), (3, 8, 16))
    out, _ = poptorch.inferenceModel(model, make_options())(None)
    torch.testing.assert_close(out, torch.bmm(model.first, model.second).detach())


def test_a_bad_number_stays_in_its_group():
    model = Grouped(*SHAPES["rows"])
    with torch.no_grad():
        model.first[0, 0] = float("nan")
    ends = torch.tensor([4, 8, 12], dtype=torch.int32)
    out, _ = poptorch.inferenceModel(model, make_options())(ends)
    assert out[0].isnan().all()
    assert out[1:].isfinite().all()


def test_histograms_of_integers_as_on_devices():
    class Counts(nn.Module):
        def forward(self, x):
            return torch.histc(x, bins=4, min=0, max=3)

    x = torch.tensor([0, 3, 3, 1, 7, 2, 3], dtype=torch.int32)
    counts = poptorch.inferenceModel(Counts(), make_options())(x)
    assert counts.dtype == torch.int32
    assert counts.tolist() == [1, 1, 1, 3]
