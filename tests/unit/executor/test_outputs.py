"""The results of a call."""

import copy
from collections import namedtuple

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.enums import OutputMode
from tests.unit.executor.nets import (
    LR,
    TOLERANCE,
    Function,
    Net,
    batch,
    eager_step,
    infer,
    make_options,
    train,
)


def test_outputs_are_fresh_tensors():
    model = infer(Net())
    x, _ = batch()
    first = model(x)
    kept = first.clone()
    second = model(x + 1)
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, kept)
    first.zero_()
    assert torch.equal(model(x), kept)


@pytest.mark.parametrize("wrap", [train, infer])
def test_outputs_need_no_gradient(wrap):
    out, loss = wrap(Net())(*batch())
    for tensor in (out, loss):
        assert type(tensor) is torch.Tensor
        assert not tensor.requires_grad
        assert tensor.device.type == "cpu"
        assert not tensor.is_inference()
        tensor.add_(1)


def test_gradients_never_reach_the_host():
    net = Net()
    train(net)(*batch())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_a_returned_input_is_a_copy():
    model = infer(Function(lambda x: (x, x)))
    x = torch.ones(3)
    one, two = model(x)
    one.zero_()
    assert x.tolist() == [1.0, 1.0, 1.0]
    assert two.tolist() == [1.0, 1.0, 1.0]


Point = namedtuple("Point", "x, y")


@pytest.mark.parametrize(
    "structure",
    [
        lambda x: None,
        lambda x: (x, [x + 1, {"k": x * 2, "n": None}], 3, "text"),
        lambda x: Point(x, (x - 1,)),
        lambda x: [x],
        lambda x: (x,),
        lambda x: {"only": x},
    ],
    ids=["None", "nested", "namedtuple", "list", "tuple", "dict"],
)
def test_the_structure_of_outputs_is_kept(structure):
    x = torch.ones(2)
    expected, actual = structure(x), infer(Function(structure))(x)

    def check(ours, theirs):
        assert type(ours) is type(theirs)
        if isinstance(ours, torch.Tensor):
            assert torch.equal(ours, theirs)
        elif isinstance(ours, dict):
            assert list(ours) == list(theirs)
            for key in ours:
                check(ours[key], theirs[key])
        elif isinstance(ours, (list, tuple)):
            for a, b in zip(ours, theirs, strict=True):
                check(a, b)
        else:
            assert ours == theirs

    check(actual, expected)


def test_a_model_without_inputs():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor([2.0]))

        def forward(self):
            return self.w * 3, poptorch.identity_loss(self.w, "sum")

    net = Fixed()
    model = train(net)
    assert [model()[0].item() for _ in range(2)] == [6.0, (2 - LR) * 3]


def test_wide_types_come_back_narrow():
    model = infer(Function(lambda a, b, c: (a + 1, b * 2, c - 1)))
    a, b, c = model(
        torch.tensor([2**30]), torch.tensor([0.1], dtype=torch.double), torch.ones(1).bfloat16()
    )
    assert (a.dtype, b.dtype, c.dtype) == (torch.int32, torch.float32, torch.float32)
    assert a.item() == 2**30 + 1
    assert b.item() == pytest.approx(0.2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_parameters_of_wide_types_run_in_float(dtype):
    net = nn.Linear(4, 3).to(dtype)
    before = net.weight.detach().clone()
    x = torch.randn(2, 4).to(dtype)
    out = infer(net)(x)
    assert out.dtype == torch.float32
    expected = nn.functional.linear(x.float(), net.weight.float(), net.bias.float())
    torch.testing.assert_close(out, expected.detach(), **TOLERANCE)
    assert torch.equal(net.weight, before)
    assert net.weight.dtype == dtype


def test_training_a_model_of_doubles():
    net = Net().double()
    twin = copy.deepcopy(net).float()
    x, y = batch()
    model = train(net)
    out, _ = model(x.double(), y)
    expected, _ = eager_step(twin, torch.optim.SGD(twin.parameters(), lr=LR), x, y)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected, **TOLERANCE)
    assert net.fc1.weight.dtype == torch.float64
    torch.testing.assert_close(net.fc1.weight.float(), twin.fc1.weight, **TOLERANCE)


def change_first(x):
    x[:, 0] = 7.0
    return x.sum()


def test_an_input_changed_in_forward_is_written_back():
    x = torch.zeros(2, 3)
    total = infer(Function(change_first))(x)
    assert total == 14.0
    assert x[:, 0].tolist() == [7.0, 7.0]
    assert x[:, 1:].count_nonzero() == 0


@pytest.mark.parametrize("mode", ["All", "Final", "Sum"])
def test_every_micro_batch_of_a_changed_input_is_written_back(mode):
    options = make_options(3)
    options.outputMode(poptorch.OutputMode[mode])

    def function(x):
        x.mul_(2)
        return x.sum()

    x = torch.arange(6.0).view(6, 1)
    infer(Function(function), options)(x)
    assert x.flatten().tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float16, torch.int32], ids=str)
def test_a_changed_input_keeps_its_type(dtype):
    x = torch.tensor([1, 2, 3], dtype=dtype)

    def function(x):
        x.add_(x)
        return x.sum()

    infer(Function(function))(x)
    assert x.dtype == dtype
    assert x.tolist() == [2, 4, 6]


def test_a_changed_input_can_be_returned_too():
    x = torch.ones(3)

    def function(x):
        x.mul_(5)
        return x

    out = infer(Function(function))(x)
    assert out.tolist() == [5.0, 5.0, 5.0]
    assert x.tolist() == [5.0, 5.0, 5.0]
    out.zero_()
    assert x.tolist() == [5.0, 5.0, 5.0]


def test_the_change_happens_again_at_every_call():
    def function(x, y):
        y.add_(x)
        return x * 2

    model = infer(Function(function))
    x, y = torch.ones(2), torch.zeros(2)
    for _ in range(3):
        assert model(x, y).tolist() == [2.0, 2.0]
    assert y.tolist() == [3.0, 3.0]
    assert x.tolist() == [1.0, 1.0]


def test_an_input_changed_while_training():
    class Changes(Net):
        def forward(self, x, y):
            x.clamp_(min=0)
            return super().forward(x, y)

    x, y = batch(8)
    expected = x.clamp(min=0)
    train(Changes(), make_options(2, 2))(x, y)
    assert torch.equal(x, expected)


def test_an_unchanged_input_is_left_alone():
    x, y = batch()
    kept = x.clone(), y.clone()
    train(Net())(x, y)
    assert torch.equal(x, kept[0])
    assert torch.equal(y, kept[1])
    assert x._version == 0


@pytest.mark.parametrize("mode", [OutputMode.All, OutputMode.Final, OutputMode.Sum])
def test_what_no_run_changes_is_returned_once(mode):
    class Tables(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.ones(3)
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            table = self.table.to("ipu")
            return torch.zeros(()), table, (table * 2).view(3, 1), self.weight, x

    model = infer(Tables(), make_options(2).outputMode(mode))
    scalar, table, twice, weight, x = model(torch.ones(4))
    assert scalar.shape == ()
    assert torch.equal(table, torch.ones(3))
    assert torch.equal(twice, torch.full((3, 1), 2.0))
    copies = 2 if mode == OutputMode.All else 1
    assert weight.shape == (2 * copies,)
    assert x.shape == (2 * copies,)


def test_a_tensor_of_the_host_among_the_results_is_warned_of_and_returned_as_it_is():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.ones(3)

        def forward(self, x):
            return {"x": x, "table": self.table}

    net = Table()
    model = infer(net, make_options(2))
    with pytest.warns(UserWarning, match=r"Output expected to be on the IPU, but .*table.* cpu"):
        first = model(torch.ones(4))
    assert first["table"] is net.table
    assert model(torch.ones(4))["table"] is net.table


def test_results_are_new_tensors_each():
    model = infer(Function(lambda x: (x, x, (x + 1).to(torch.int64))))
    x = torch.ones(2)
    first, second, number = model(x)
    assert len({t.data_ptr() for t in (x, first, second)}) == 3
    assert number.dtype == torch.int32
