"""Changes through views that show elements several times or leave some out: unfold, as_strided."""

import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options


def _last_by_two(y):
    windows = y.t().unfold(0, 2, 3)
    windows.transpose(0, 1)[1].add_(1.0)
    windows.mul_(3.0)


def _as_strided_after_a_change(y):
    v = y.view(-1)
    v.mul_(2.0)
    v.as_strided((2,), (1,), 0).mul_(0.5)


def _read_afterwards(y):
    windows = y.unfold(1, 2, 1)
    windows[:, 0].mul_(2.0)
    y[:, 5] += windows.sum((1, 2))


def _twice(y):
    windows = y.unfold(0, 2, 2).unfold(1, 3, 4)
    windows.mul_(2.0)
    windows[0].sub_(1.0)


def _whole_window_to(y):
    y.unfold(-1, 4, 4)[:, 1].copy_(y.unfold(-1, 4, 4)[:, 0])


def _as_strided_after_a_transposed_change(y):
    y.t()[3:5].mul_(2.0)
    y.t().as_strided((3, 1), (4, 4), 3).fill_(3.0)


def _view_of_as_strided(y):
    y.as_strided((3, 3), (3, 1), 1)[:, ::2].t().mul_(2.0)


def _row(y):
    y[2].unfold(0, 4, 3)[1].mul_(2.0)
    y[1].as_strided((2, 2), (2, 3), 11).add_(1.0)


# Each changes a tensor of shape (3, 10).
CHANGES = {
    "rows left out": lambda y: y.unfold(0, 2, 2).mul_(2.0),
    "window function": lambda y: y.unfold(-1, 4, 4).mul_(torch.hann_window(4)),
    "gaps": lambda y: y.unfold(-1, 2, 3).mul_(2.0),
    "one of overlapping": lambda y: y.unfold(1, 3, 1)[:, 0].mul_(3.0),
    "every third of overlapping": lambda y: y.unfold(1, 3, 1)[:, ::3].mul_(3.0),
    "as_strided windows": lambda y: y.as_strided((1, 3, 2), (4, 1, 1))[:, 0].fill_(0.0),
    "as_strided item": lambda y: y.as_strided((3, 2), (1, 1), 5)[2].mul_(2.0),
    "assignment": lambda y: y.unfold(1, 3, 1)[:, 0].__setitem__(0, 7.0),
    "transposed": _last_by_two,
    "exact": lambda y: y.unfold(1, 5, 5).mul_(2.0),
    "as_strided after a change": _as_strided_after_a_change,
    "read afterwards": _read_afterwards,
    "twice": _twice,
    "from other windows": _whole_window_to,
    "as_strided after a transposed change": _as_strided_after_a_transposed_change,
    "view of as_strided": _view_of_as_strided,
    "row": _row,
    "whole memory": lambda y: y[:, 1:].unfold(1, 2, 3).mul_(2.0),
}


class Changed(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.w = nn.Parameter(torch.arange(1.0, 11.0) / 8)
        self._change = change

    def forward(self, x):
        y = x * self.w
        self._change(y)
        return y, poptorch.identity_loss((y * y).sum(), "none")


@pytest.mark.parametrize("name", CHANGES)
def test_values_and_gradients(name):
    model = Changed(CHANGES[name])
    eager = copy.deepcopy(model)
    x = torch.arange(30.0).view(3, 10)
    options = make_options()
    options.anchorTensor("gradient", "Gradient___w")
    device = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.0))
    out, loss = device(x)
    expected, expected_loss = eager(x)
    expected_loss.backward()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(loss, expected_loss.detach())
    torch.testing.assert_close(device.getAnchoredTensor("gradient"), eager.w.grad)


@pytest.mark.parametrize("name", CHANGES)
def test_inference(name):
    model = Changed(CHANGES[name])
    x = torch.arange(30.0).view(3, 10)
    out, _ = poptorch.inferenceModel(model, make_options())(x)
    torch.testing.assert_close(out, model(x)[0].detach())


class ChangedInput(nn.Module):
    def __init__(self, change):
        super().__init__()
        self._change = change

    def forward(self, x):
        self._change(x)
        return x + 0 if x.dtype != torch.bool else ~x


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_dtypes(dtype):
    x = (torch.arange(30) % 3).view(3, 10).to(dtype)
    expected_input, given = x.clone(), x.clone()
    model = ChangedInput(lambda y: y.unfold(1, 2, 3).copy_(y[:, 1:7].view(3, 3, 2).clone()))
    expected = model(expected_input)
    out = poptorch.inferenceModel(model, make_options())(given)
    assert torch.equal(out, expected.to(out.dtype))
    assert torch.equal(given, expected_input)


def test_out():
    def change(y):
        windows = y.unfold(1, 2, 3)
        torch.mul(windows, 3.0, out=windows)
        windows.add_(1.0)

    x = torch.arange(30.0).view(3, 10)
    expected = ChangedInput(change)(x.clone())
    assert torch.equal(poptorch.inferenceModel(ChangedInput(change), make_options())(x), expected)


def test_list_of_tensors_is_refused():
    def change(y):
        torch._foreach_mul_([y.unfold(1, 2, 3)], 2.0)

    model = poptorch.inferenceModel(ChangedInput(change), make_options())
    with pytest.raises(poptorch.Error, match=r"unfold.*together with other tensors"):
        model(torch.ones(3, 10))


@pytest.mark.parametrize("value", [0.0, 7.0])
def test_one_value_for_overlapping_windows(value):
    model = ChangedInput(lambda y: y[:, 1:].unfold(1, 3, 1).fill_(value))
    x = torch.ones(3, 10)
    expected = model(x.clone())
    assert torch.equal(poptorch.inferenceModel(model, make_options())(x), expected)


def test_body_of_a_loop():
    class Loop(nn.Module):
        def forward(self, x):
            def body(y):
                y = y * 1
                y.unfold(-1, 4, 4).mul_(2.0)
                return (y,)

            return poptorch.for_loop(3, body, [x])[0]

    x = torch.ones(2, 10)
    expected = x.clone()
    expected[:, :8] = 8.0
    assert torch.equal(poptorch.inferenceModel(Loop(), make_options())(x), expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y.unfold(1, 3, 1).mul_(2.0),
        lambda y: y.as_strided((4, 3), (1, 1)).add_(1.0),
    ],
)
def test_changes_that_depend_on_their_order_are_refused(change):
    model = poptorch.inferenceModel(ChangedInput(lambda y: change(y)), make_options())
    with pytest.raises(
        poptorch.Error, match=r"test_window_writes.py:\d+ changes a view of .*order"
    ):
        model(torch.ones(3, 10))
