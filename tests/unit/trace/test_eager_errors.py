"""Mistakes in calls of torch functions raise the same errors as in eager PyTorch."""

import traceback

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import popsim_torch as poptorch

MISTAKES = {
    "conv2d": lambda x: torch.conv2d(x, x),
    "matmul": lambda x: x @ torch.ones(7, 8),
    "linear": lambda x: F.linear(x, torch.ones(4, 9)),
    "cat": lambda x: torch.cat([x, x[0]]),
    "attribute": lambda x: x.nothing,
    "type of an argument": lambda x: torch.add(x, "a"),
    "axis": lambda x: torch.sum(x, 9),
    "axis of softmax": lambda x: torch.softmax(x, 9),
    "axis of log_softmax": lambda x: F.log_softmax(x, dim=-3),
    "embedding": lambda x: torch.embedding(x, x),
    "index": lambda x: x[9],
    "unknown argument": lambda x: torch.sum(x, foo=3),
    "broadcast": lambda x: x + torch.ones(17),
    "gather": lambda x: torch.gather(x, 0, x),
    "masked_fill": lambda x: x.masked_fill(x, 0),
    "where": lambda x: torch.where(x, x, x),
    "module": lambda x: nn.LayerNorm(7)(x),
    "sizes": lambda x: torch.zeros(-3) + x[0, 0],
    "other device": lambda x: x.to("xpu"),
    "in place": lambda x: x.add_(torch.ones(3, 2, 3)),
    "nll_loss": lambda x: F.nll_loss(x, torch.zeros(5).long()),
    "attribute of a result": lambda x: x.half().int().foo,
}


class Net(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.called = forward

    def forward(self, x):
        return self.called(x)


def wrapped(net):
    return poptorch.inferenceModel(net, poptorch.Options().showCompilationProgressBar(False))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported_as_in_eager_mode(name):
    net, x = Net(MISTAKES[name]), torch.ones(2, 3)
    with pytest.raises(Exception) as eager:
        net(x)
    with pytest.raises(eager.type) as ours:
        wrapped(net)(x)
    assert type(ours.value) is eager.type
    assert str(ours.value) == str(eager.value)


def test_the_traceback_leads_to_the_line_of_forward():
    with pytest.raises(RuntimeError) as caught:
        wrapped(Net(MISTAKES["matmul"]))(torch.ones(2, 3))
    lines = [frame.line for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert any("torch.ones(7, 8)" in str(line) for line in lines)
    assert caught.value.__suppress_context__


def test_forward_can_catch_what_it_would_catch_in_eager_mode():
    def forward(x):
        try:
            return x @ x
        except RuntimeError as error:
            assert "mat1 and mat2" in str(error)
            return x + 1

    assert wrapped(Net(forward))(torch.zeros(2, 3)).tolist() == [[1, 1, 1]] * 2


def test_a_failed_call_leaves_the_hosts_random_numbers_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with pytest.raises(RuntimeError):
        wrapped(Net(lambda x: torch.normal(x, -x[0] * torch.ones(5))))(torch.ones(2, 3))
    assert torch.equal(torch.rand(2), expected)


def test_a_large_mistake_is_not_tried_on_the_host():
    with pytest.raises(TypeError) as caught:
        wrapped(Net(lambda x: torch.sum(x.expand(2**20, 2, 16), nothing=3)))(torch.ones(2, 16))
    assert "got (Tensor, nothing=int)" in str(caught.value)
    assert "FakeTensor" not in str(caught.value)


def test_range_makes_a_tensor_of_the_device():
    def forward(x):
        numbers = torch.range(0, 2, dtype=torch.float32)
        assert numbers.device.type == "ipu"
        return x + numbers

    assert wrapped(Net(forward))(torch.ones(3)).tolist() == [1, 2, 3]


def test_range_on_the_cpu_stays_there():
    def forward(x):
        numbers = torch.range(1, 2, device="cpu")
        assert numbers.device.type == "cpu"
        return x * int(numbers.sum())

    assert wrapped(Net(forward))(torch.ones(1)).tolist() == [3]


# Numbers of tensors


def test_tensors_have_numbers_while_they_are_traced():
    seen = []

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            y = x + 1
            seen.extend(poptorch.getIpuTensorId(t) for t in (x, y, self.weight, x))
            return y * self.weight

    wrapped(Two())(torch.ones(2))
    x, y, weight, again = seen
    assert x == again
    assert len({x, y, weight}) == 3
    assert all(isinstance(number, int) for number in seen)


def test_other_tensors_have_none():
    def forward(x):
        poptorch.getIpuTensorId(torch.ones(2, device="cpu"))
        return x

    with pytest.raises(poptorch.Error, match=r"getIpuTensorId: this tensor .* is on cpu"):
        wrapped(Net(forward))(torch.ones(2))
    with pytest.raises(poptorch.Error, match="inside of the forward"):
        poptorch.getIpuTensorId(torch.ones(2))
    with pytest.raises(poptorch.Error, match=r"needs a torch\.Tensor, got int"):
        poptorch.getIpuTensorId(3)
