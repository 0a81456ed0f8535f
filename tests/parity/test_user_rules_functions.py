"""``torch.autograd.Function`` with a backward of the user's own."""

import inspect

import pytest
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

import popsim_torch as poptorch
from tests.parity.compare import quiet_options
from tests.parity.user_rules import compare_training, momentum

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


class Sign(Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() <= 1)


class Round(Function):
    @staticmethod
    def forward(ctx, x, steps):
        return (x * steps).round() / steps

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Reversal(Function):
    @staticmethod
    def forward(ctx, x, strength=1.0):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.neg() * ctx.strength, None


class LearnedSteps(Function):
    """LSQ: a quantiser whose step is trained."""

    @staticmethod
    def forward(ctx, x, step, bits):
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        ctx.save_for_backward(x, step)
        ctx.bounds = low, high
        return (x / step).round().clamp(low, high) * step

    @staticmethod
    def backward(ctx, gradient):
        x, step = ctx.saved_tensors
        low, high = ctx.bounds
        scaled = x / step
        inside = (scaled > low) & (scaled < high)
        slope = torch.where(inside, scaled.round() - scaled, scaled.clamp(low, high))
        return gradient * inside, (gradient * slope).sum_to_size(step.shape), None


class Product(Function):
    """Computes only the gradients that are needed."""

    @staticmethod
    def forward(ctx, x, weight, bias=None):
        ctx.save_for_backward(x, weight, bias)
        result = x.mm(weight.t())
        return result if bias is None else result + bias.unsqueeze(0).expand_as(result)

    @staticmethod
    def backward(ctx, gradient):
        x, weight, bias = ctx.saved_tensors
        for_x = for_weight = for_bias = None
        if ctx.needs_input_grad[0]:
            for_x = gradient.mm(weight)
        if ctx.needs_input_grad[1]:
            for_weight = gradient.t().mm(x) * 2
        if bias is not None and ctx.needs_input_grad[2]:
            for_bias = gradient.sum(0)
        return for_x, for_weight, for_bias


class Parts(Function):
    """Several outputs; backward wants zeros for those that are not used."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin(), x.cos(), x * 3

    @staticmethod
    def backward(ctx, for_sin, for_cos, for_product):
        (x,) = ctx.saved_tensors
        assert all(g is not None for g in (for_sin, for_cos, for_product))
        return for_sin * x.cos() - for_cos * x.sin() + for_product * 5


class PartsOrNone(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, first, second):
        if second is None:
            return first * 7
        return first * 2 + second * 3


class Best(Function):
    """Its second output is an index, the third a mask."""

    @staticmethod
    def forward(ctx, x):
        values, index = x.max(1)
        mask = (x > 0).float()
        ctx.mark_non_differentiable(index, mask)
        ctx.save_for_backward(index)
        ctx.columns = x.shape[1]
        return values, index, mask

    @staticmethod
    def backward(ctx, gradient, _index, _mask):
        (index,) = ctx.saved_tensors
        return F.one_hot(index, ctx.columns) * gradient.unsqueeze(1)


class Doubled(Function):
    """Changes its input in place."""

    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2.5


class Set(Function):
    @staticmethod
    def forward(x, exponent):
        return x**exponent

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.exponent = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx, gradient):
        x, _ = ctx.saved_tensors
        return 2 * gradient * ctx.exponent * x ** (ctx.exponent - 1), None


class WithVmap(Function):
    @staticmethod
    def forward(x, y):
        return x * y.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        return gradient * y.sin(), gradient * x * y.cos() * 2

    @staticmethod
    def vmap(info, in_dims, x, y):
        assert info.batch_size == 5
        x = x if in_dims[0] is None else x.movedim(in_dims[0], 0)
        y = y if in_dims[1] is None else y.movedim(in_dims[1], 0)
        return WithVmap.apply(x, y), 0


class Once(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].exp() * 1.5


class Attributes(Function):
    """Keeps tensors on the context itself."""

    @staticmethod
    def forward(ctx, x, settings, names, nothing):
        ctx.y = x * settings["factor"]
        ctx.count = len(names)
        return ctx.y.tanh()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 - ctx.y.tanh() ** 2) * ctx.count, None, None, None


class SavedOutput(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.sigmoid()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        return gradient * y * (1 - y) * 3


class Swish(Function):
    """Computes its inner gradient with autograd."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            z = y * y.sigmoid()
            (inner,) = torch.autograd.grad(z, y, gradient)
        return inner * 2


class Outer(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return Sign.apply(x) * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return Round.apply(gradient * x, 8)


class Changing(Function):
    """Changes the gradient that it gets in place."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient[:, 0] = 0
        gradient.clamp_(-0.5, 0.5)
        return gradient


class Rows(Function):
    """Takes an index."""

    @staticmethod
    def forward(ctx, table, index):
        ctx.save_for_backward(index)
        ctx.shape = table.shape
        return table[index]

    @staticmethod
    def backward(ctx, gradient):
        (index,) = ctx.saved_tensors
        return torch.zeros(ctx.shape).index_add(0, index, gradient * 2), None


class Wide(Function):
    """Returns a gradient of a shape that is larger than that of the input."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, gradient * x


class Forwards(Function):
    """Has a rule for forward-mode differentiation, with a factor of its own."""

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].cos()

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * ctx.saved_tensors[0].cos() * 2


class Passed(Function):
    """Returns its input itself, and another."""

    @staticmethod
    def forward(ctx, x, y):
        return x, y * 2

    @staticmethod
    def backward(ctx, for_x, for_y):
        return for_x * 3, for_y * 4


class NoGradient(Function):
    @staticmethod
    def forward(ctx, x, weight):
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class SecondOrder(Function):
    """Its backward is differentiated: a cube with rules for both orders."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return Slope.apply(x, gradient)


class Slope(Function):
    @staticmethod
    def forward(ctx, x, gradient):
        ctx.save_for_backward(x, gradient)
        return gradient * 3 * x**2

    @staticmethod
    def backward(ctx, second):
        x, gradient = ctx.saved_tensors
        return second * gradient * 5 * x, second * 3 * x**2


class ListOfTensors(Function):
    @staticmethod
    def forward(ctx, *tensors):
        ctx.number = len(tensors)
        return torch.stack(tensors).sum(0)

    @staticmethod
    def backward(ctx, gradient):
        return tuple(gradient * (i + 1) for i in range(ctx.number))


class SavedTogether(Function):
    """Reads settings from the context's own dictionary and saves intermediate values."""

    @staticmethod
    def forward(ctx, x, weight, settings):
        y = x @ weight.t()
        z = y.relu()
        ctx.save_for_backward(x, weight, y)
        ctx.settings = settings
        return z.pow(settings["power"])

    @staticmethod
    def backward(ctx, gradient):
        x, weight, y = ctx.saved_tensors
        power = ctx.settings["power"]
        gradient = gradient * power * y.relu().pow(power - 1)
        return gradient @ weight, gradient.t() @ x, None


class OwnGraph(Function):
    """Keeps the graph of its own forward, and differentiates it in backward."""

    @staticmethod
    def forward(ctx, x, weight):
        with torch.enable_grad():
            ctx.inputs = x.detach().requires_grad_(), weight.detach().requires_grad_()
            ctx.result = (ctx.inputs[0] * ctx.inputs[1]).tanh()
        return ctx.result.detach()

    @staticmethod
    def backward(ctx, gradient):
        return torch.autograd.grad(ctx.result, ctx.inputs, gradient)


class OwnCheckpoint(Function):
    @staticmethod
    def forward(ctx, run, x, *parameters):
        ctx.run = run
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, gradient):
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.run(x)
        return None, *torch.autograd.grad(y, (x, *parameters), gradient)


class Reversible(Function):
    """A block of a reversible network: backward computes the inputs again from the results."""

    @staticmethod
    def forward(ctx, x, f, g):
        ctx.functions = f, g
        a, b = x.chunk(2, 1)
        with torch.no_grad():
            a = a + f(b)
            b = b + g(a)
        ctx.results = a, b
        return torch.cat([a, b], 1)

    @staticmethod
    def backward(ctx, gradient):
        (f, g), (a, b) = ctx.functions, ctx.results
        of_a, of_b = gradient.chunk(2, 1)
        with torch.enable_grad():
            a = a.detach().requires_grad_()
            through = g(a)
        of_a = of_a + torch.autograd.grad(through, a, of_b)[0]
        with torch.enable_grad():
            b = (b - through).detach().requires_grad_()
            through = f(b)
        of_b = of_b + torch.autograd.grad(through, b, of_a)[0]
        return torch.cat([of_a, of_b], 1), None, None


class WritesBuffer(Function):
    @staticmethod
    def forward(ctx, x, buffer):
        buffer.mul_(0.9).add_(x.mean(0) * 0.1)
        return x - buffer

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class HostTensors(Function):
    @staticmethod
    def forward(ctx, x, factors):
        ctx.factors = factors
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.tensor(ctx.factors) + torch.ones(4), None


class Layer(torch.nn.Module):
    def forward(self, x):
        return Sign.apply(x)


def second_derivative(function):
    def run(m, x):
        y = m.fc(x)
        (slope,) = torch.autograd.grad(function(y).sum(), y, create_graph=True)
        return slope * m.scale

    return run


def unused_parts(m, x):
    a, b, _ = Parts.apply(m.fc(x))
    return a * b


def in_place_function(m, x):
    y = m.fc(x) * 1
    z = Doubled.apply(y)
    return z + y


def in_place_function_of_a_view(m, x):
    y = m.fc(x) * 1
    Doubled.apply(y[:, 1:3])
    return y * m.scale


def with_best(m, x):
    values, index, mask = Best.apply(m.fc(x))
    return values, index, mask * m.scale


PROGRAMS = {
    "straight-through sign": lambda m, x: Sign.apply(m.fc(x)) * m.scale,
    "sign in a layer": lambda m, x: Layer()(m.fc(x)) * m.scale,
    "binary weights": lambda m, x: x @ Sign.apply(m.fc.weight).t() + m.fc.bias,
    "rounding": lambda m, x: Round.apply(m.fc(x), 4) * m.scale,
    "rounded weights": lambda m, x: F.linear(x, Round.apply(m.fc.weight, 16), m.fc.bias),
    "gradient reversal": lambda m, x: m.last(Reversal.apply(m.fc(x), 0.3)),
    "gradient reversal by default": lambda m, x: m.last(Reversal.apply(m.fc(x))),
    "reversal of part of the loss": lambda m, x: (
        m.fc(x) * m.scale,
        m.last(Reversal.apply(m.fc(x), 2.0)),
    ),
    "learned steps": lambda m, x: LearnedSteps.apply(m.fc(x), m.scale.abs() + 0.1, 3),
    "needs_input_grad": lambda m, x: Product.apply(x, m.fc.weight, m.fc.bias),
    "needs_input_grad without a bias": lambda m, x: Product.apply(x, m.fc.weight),
    "needs_input_grad of everything": lambda m, x: Product.apply(m.fc(x), m.last.weight, None),
    "several outputs": lambda m, x: Parts.apply(m.fc(x)),
    "an output is not used": unused_parts,
    "None for what is not used": lambda m, x: PartsOrNone.apply(m.fc(x))[0],
    "None is not given for what is used": lambda m, x: PartsOrNone.apply(m.fc(x)),
    "mark_non_differentiable": with_best,
    "mark_dirty": in_place_function,
    "mark_dirty of a view": in_place_function_of_a_view,
    "setup_context": lambda m, x: Set.apply(m.fc(x), 2),
    "a vmap rule": lambda m, x: torch.vmap(WithVmap.apply, (0, None))(m.fc(x), m.scale),
    "a vmap rule outside of vmap": lambda m, x: WithVmap.apply(m.fc(x), m.scale.expand(5, 4)),
    "once_differentiable": lambda m, x: Once.apply(m.fc(x)),
    "attributes of the context": lambda m, x: Attributes.apply(
        m.fc(x), {"factor": 2.0}, ["a", "b"], None
    ),
    "a saved output": lambda m, x: SavedOutput.apply(m.fc(x)),
    "autograd in backward": lambda m, x: Swish.apply(m.fc(x)),
    "a Function in a Function": lambda m, x: Outer.apply(m.fc(x)),
    "a gradient changed in place": lambda m, x: Changing.apply(m.fc(x)) * 2,
    "rows of a table": lambda m, x: Rows.apply(m.fc.weight, torch.tensor([0, 2, 2, 1, 3])) * x,
    "a gradient that is summed to the shape": lambda m, x: Wide.apply(m.fc(x), m.scale),
    "the result is the input": lambda m, x: Passed.apply(m.fc(x), m.scale),
    "no gradient for a weight": lambda m, x: NoGradient.apply(m.fc(x), m.scale),
    "second derivatives": second_derivative(SecondOrder.apply),
    "derivatives of a derived backward": second_derivative(lambda y: Set.apply(0.3 * y, 3)),
    "many tensors": lambda m, x: ListOfTensors.apply(m.fc(x), m.scale.expand(5, 4), x),
    "intermediate values": lambda m, x: SavedTogether.apply(m.fc(x), m.last.weight, {"power": 2}),
    "twice with one input": lambda m, x: Sign.apply(m.scale) * x + Sign.apply(m.scale) * m.fc(x),
    "in forward mode": lambda m, x: torch.func.jvp(Forwards.apply, (m.fc(x),), (x * m.scale,)),
    "under func.grad": lambda m, x: torch.func.grad(lambda y: Set.apply(y, 3).sum())(m.fc(x)),
    "under func.vjp": lambda m, x: torch.func.vjp(Forwards.apply, m.fc(x))[1](m.scale * x)[0],
    "without gradients": lambda m, x: Sign.apply(x) + m.fc(x),
    "a graph of its own": lambda m, x: OwnGraph.apply(m.fc(x), m.scale),
    "a checkpoint of the user's": lambda m, x: OwnCheckpoint.apply(
        m.last, m.fc(x), *m.last.parameters()
    ),
    "reversible": lambda m, x: Reversible.apply(m.fc(x), lambda b: b.tanh() * 2, torch.sin),
    "a buffer that it changes": lambda m, x: WritesBuffer.apply(m.fc(x), m.kept),
    "host tensors in backward": lambda m, x: HostTensors.apply(m.fc(x), [1.0, 2.0, 3.0, 4.0]),
    "under no_grad": lambda m, x: m.scale * torch.no_grad()(Sign.apply)(m.fc(x)),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_it_trains_as_in_eager_pytorch(program):
    compare_training(program)


def weighted(gradient):
    return gradient * torch.tensor([1.0, 2, 3, 4]) + torch.ones(4)


@pytest.mark.parametrize("hooked", [False, True])
def test_what_backward_computes_is_on_the_stage_of_the_call(hooked):
    class Staged(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)

        def forward(self, x):
            with poptorch.Block("first", ipu_id=0):
                y = self.first(x)
                if hooked:
                    y.register_hook(weighted)
                else:
                    y = HostTensors.apply(y, [1.0, 2.0, 3.0, 4.0])
            with poptorch.Block("last", ipu_id=1):
                return poptorch.identity_loss(self.last(y).square(), reduction="mean")

    model, twin = Staged(), Staged()
    options = quiet_options()
    options.deviceIterations(1).Training.gradientAccumulation(3)
    executor = poptorch.trainingModel(model, options, momentum(model))
    x = torch.randn(15, 4, generator=torch.Generator().manual_seed(2))
    executor(x)
    optimizer = momentum(twin)
    for part in x.chunk(3):
        twin(part).backward()
    for parameter in twin.parameters():
        parameter.grad /= 3
    optimizer.step()
    torch.testing.assert_close(dict(model.state_dict()), dict(twin.state_dict()))
    lines, first = inspect.getsourcelines(weighted if hooked else HostTensors.backward)
    places = {f"{__file__}:{first + i}" for i in range(len(lines))}
    ops = [op for op in executor.compiled.program.graph.ops if op.origin.source in places]
    assert ops
    assert {(op.origin.stage, op.origin.backward) for op in ops if op.inputs} == {(0, True)}
