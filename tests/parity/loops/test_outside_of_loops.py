"""What a function computes outside of its loops has eager PyTorch's values in every call."""

import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch

pytestmark = pytest.mark.timeout(60, method="thread")


def eager_repeat(n, body, inputs=()):
    values = inputs
    for _ in range(n):
        values = body(values)
    return values


def check(make, calls, *, change=lambda: None):
    """Compare a function with eager PyTorch, call by call.

    Args:
        make: Returns the function for a ``repeat``.
        calls: The arguments of each call.
        change: What is done to state of the host between calls.
    """
    ours, eager = poptorch.function(make(poptorch.repeat)), make(eager_repeat)
    for arguments in calls:
        found = ours(*copy.deepcopy(arguments))
        expected = eager(*copy.deepcopy(arguments))
        torch.testing.assert_close(found, expected)
        change()
    assert len(ours._recordings) == 1


def some(count=3, *shape):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(*(shape or (3,)), generator=generator),) for _ in range(count)]


def test_in_front_of_loops_between_them_and_behind():
    def make(repeat):
        def run(x):
            first = x * 2 + 1
            half = first.mean()
            y = repeat(3, lambda y: y + first * half, first)
            z = repeat(2, lambda z: z * 0.5, (y - x).abs())
            largest = torch.stack([y, z]).max(0)
            return {"largest": largest.values, "where": largest.indices, "y": y, "size": len(y)}

        return run

    check(make, some())


CHANGES = {
    "whole": lambda kept: kept.add_(1),
    "item": lambda kept: kept.__setitem__(0, kept[0] + 1),
    "view": lambda kept: kept[0].add_(1),
    "out": lambda kept: torch.add(kept, 1, out=kept),
    "detached": lambda kept: kept.detach().add_(1),
    "data": lambda kept: kept.data.mul_(2).add_(1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_tensor_from_outside_that_changes_in_place_is_read_anew_by_each_loop(change):
    def make(repeat):
        kept = torch.zeros(3)

        def run(x):
            change(kept)
            y = repeat(1, lambda y: y + kept, x)
            change(kept)
            return repeat(2, lambda y: y * kept, y), kept.clone()

        return run

    check(make, some())


def test_changes_in_place_and_views():
    def make(repeat):
        def run(x):
            x = x.clone()
            sums = torch.zeros(4)
            row = sums[1:]
            row += x
            sums[0] = x.sum()
            y = repeat(2, lambda y: y + sums.mean(), sums)
            for number, part in enumerate(y):
                sums[number] -= part
            first, *_ = y.split(1)
            return sums, row, first

        return run

    check(make, some())


def test_tensors_from_outside_have_the_values_of_each_call():
    state = {"scale": torch.tensor(2.0), "count": {False: torch.zeros(()), True: torch.zeros(())}}

    def make(repeat):
        count = state["count"][repeat is eager_repeat]

        def run(x):
            count.add_(x.sum() > 0)
            y = repeat(2, lambda y: y + 1, x * state["scale"] + count)
            return y, repeat(2, lambda c: c * 3, state["scale"]), count.clone()

        return run

    check(make, some(), change=lambda: state["scale"].mul_(1.5))


def test_weights_that_loops_train_and_layers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    models = {True: copy.deepcopy(model), False: model}

    def make(repeat):
        model = models[repeat is eager_repeat]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def body(x):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            return x

        def run(x):
            before = model(x).mean()
            x = repeat(3, body, x)
            penalty = sum(p.square().sum() for p in model.parameters())
            with torch.no_grad():
                model[0].bias.mul_(0.5)
            return before.detach(), penalty.detach(), model(x).detach()

        return run

    check(make, some(3, 4, 3))
    expected = models[True].state_dict()
    for name, ours in models[False].state_dict().items():
        if ours.is_floating_point():  # (others are constants of the device)
            torch.testing.assert_close(ours, expected[name])


def test_gradients_of_what_is_computed_outside_are_there():
    weight = nn.Parameter(torch.ones(3))

    @poptorch.function
    def run(x):
        poptorch.repeat(2, lambda y: y, x)
        with torch.no_grad():
            unneeded = (weight * 5).sum()
        return (weight * x).sum() + unneeded

    for (x,) in some():
        weight.grad = None
        run(x).backward()
        torch.testing.assert_close(weight.grad, x)
    with torch.no_grad():
        assert not run(x).requires_grad
    assert run(x).requires_grad


def test_autocast():
    def make(repeat):
        def run(x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                product = x @ x
            return product.float() + repeat(1, lambda y: y, x)

        return run

    check(make, some(3, 2, 2))


def test_random_numbers_are_drawn_in_each_call():
    @poptorch.function
    def run():
        return poptorch.repeat(1, lambda x: x, torch.rand(4)), torch.rand(4)

    drawn = torch.stack([one for _ in range(3) for one in run()])
    assert len(set(drawn.flatten().tolist())) == 24
    torch.manual_seed(3)
    first = run()
    torch.manual_seed(3)
    torch.testing.assert_close(run(), first)


def test_what_nobody_holds_is_no_input_of_a_loop():
    @poptorch.function
    def run(x):
        for _ in range(50):
            x = x + 1
        return poptorch.repeat(2, lambda y: y * 2, x)

    assert run(torch.tensor(1.0)).item() == 51 * 4
    (program,) = run.programs
    assert len(program.compiled.input_dtypes) <= 2
    assert run(torch.tensor(2.0)).item() == 52 * 4


@pytest.mark.parametrize("iterations", [0, 2])
def test_while_loop(iterations):
    @poptorch.function
    def run(x, limit):
        bound = limit * 1.0
        y = poptorch.while_loop(lambda y: y < bound, lambda y: y + 1, x + 0.5)
        return y - bound

    for start in (0.0, 0.25):
        assert run(torch.tensor(start), torch.tensor(iterations)).item() == start + 0.5


def test_constants_can_be_read():
    table = torch.tensor([1.0, 2.0])

    @poptorch.function
    def run(x):
        size = int(torch.tensor([2, 3]).sum())
        if table[0] < 2 and torch.zeros(2).add_(1).tolist() == [1, 1]:
            return poptorch.repeat(size, lambda y: y + x.shape[0], x)
        return None

    assert run(torch.zeros(2)).tolist() == [10, 10]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_compiled_functions_are_computed_call_by_call():
    def make(repeat):
        scaled = torch.compile(lambda x: x.sin() * 2)
        return lambda x: repeat(2, lambda y: y + 1, scaled(x)) - scaled(x)

    check(make, some())


def scan(x):
    return torch._higher_order_ops.scan(lambda c, v: (c + v, c * v), torch.zeros(()), x)[1]


def cond(x):
    return torch.cond(x.sum() > 0, lambda v: v * 2, lambda v: v - 1, (x,))


@pytest.mark.parametrize("operator", [scan, cond])
def test_operators_that_take_functions_are_refused_by_name(operator):
    run = poptorch.function(lambda x: poptorch.repeat(2, lambda y: y + 1, operator(x)))
    text = rf"'{operator.__name__}' is called at .*\.py:\d+ outside of a loop, and takes Python"
    with pytest.raises(poptorch.Error, match=text):
        run(torch.ones(3))
