"""What a program does around loops and branches: prints, anchors, random numbers, files, stages."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import popsim_torch as poptorch
from popsim_torch.enums import OutputMode
from tests.options import make_options
from tests.parity.compare import Loop
from tests.parity.control.flow import Net, check_training, cond, for_loop, sample, sgd

THREE = torch.tensor([1.0, 2.0, 3.0])


def train(net, options=None):
    return poptorch.trainingModel(net, options or make_options(), sgd(net.parameters()))


# --- Random numbers --------------------------------------------------------------------------


class Dropouts(nn.Module):
    """Returns what dropout let through in each iteration; the loss weighs iterations
    differently."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.full((1000,), 0.5))

    def forward(self, x):
        def body(total, rows, factor):
            row = F.dropout(self.w * x, 0.5)
            rows = torch.cat([rows[1:], row[None]])
            return total + (row * factor).sum(), rows, factor + 1

        start = [torch.zeros(()), torch.zeros(3, 1000), torch.ones(())]
        total, rows, _ = poptorch.for_loop(3, body, start)
        return rows, poptorch.identity_loss(total, "none")


def drop(seed):
    options = make_options(seed=seed)
    options.anchorTensor("gradient", "Gradient___w")
    device = train(Dropouts(), options)
    rows, _ = device(torch.ones(1000))
    return rows, device.getAnchoredTensor("gradient")


def test_dropout_is_another_in_each_iteration_and_the_same_in_the_gradient():
    rows, gradient = drop(3)
    masks = rows != 0
    for i, j in [(0, 1), (0, 2), (1, 2)]:
        assert 0.4 < (masks[i] != masks[j]).float().mean() < 0.6
    assert torch.equal(gradient, (masks * 2.0 * THREE[:, None]).sum(0))


def test_random_numbers_follow_the_seed():
    assert torch.equal(drop(3)[0], drop(3)[0])
    assert not torch.equal(drop(3)[0], drop(4)[0])


# --- Prints and anchors ----------------------------------------------------------------------


def shows(net, x):
    def inner(z):
        return poptorch.ipu_print_tensor(z * 2, "inner")

    def body(y):
        y = poptorch.ipu_print_tensor(y + net.w.sum() * 0 + 1, "outer")
        return for_loop(2, inner, [y])[0]

    return for_loop(2, body, [x])


def printed(device, capfd, x):
    """Compile and run; return title and value of each line."""
    device.compile(x)
    capfd.readouterr()
    device(x)
    out, err = capfd.readouterr()
    lines = [line.split(": ") for line in (out + err).splitlines() if line]
    return [(title, float(value.strip("()"))) for title, value in lines]


@pytest.mark.parametrize("training", [True, False])
def test_prints_come_once_per_iteration_and_in_order(capfd, training):
    net = Net(shows)
    device = train(net) if training else poptorch.inferenceModel(net.eval(), make_options())
    shown = printed(device, capfd, torch.zeros(1))
    inner, outer = "inner", "outer"
    forward = [(outer, 1), (inner, 2), (inner, 4), (outer, 5), (inner, 10), (inner, 20)]
    assert shown[:6] == forward
    # The loss is the square of the result, 20; gradients come from the last iteration to the first.
    inner, outer = "inner_gradient", "outer_gradient"
    backward = [(inner, 40), (inner, 80), (outer, 160), (inner, 160), (inner, 320), (outer, 640)]
    assert shown[6:] == (backward if training else [])


def test_prints_without_their_gradients(capfd):
    def function(net, x):
        def body(y):
            return poptorch.ipu_print_tensor(y * 2, "t", print_gradient=False) * net.w.sum()

        return for_loop(2, body, [x])

    assert len(printed(train(Net(function)), capfd, torch.ones(1))) == 2


def test_prints_of_nested_loops_are_not_repeated_for_the_gradient(capfd):
    """The gradient of the outer loop runs the inner ones once more."""

    def function(net, x):
        def inner(z):
            return torch.tanh(poptorch.ipu_print_tensor(z, "t") * net.w.sum())

        def side(y):
            return for_loop(2, inner, [y])[0]

        return for_loop(2, lambda y: cond(y > 5, torch.sin, [y], side, [y])[0] ** 2, [x])

    titles = [title for title, _ in printed(train(Net(function)), capfd, torch.ones(1))]
    assert titles == ["t"] * 4 + ["t_gradient"] * 4


def anchored(net, x):
    def body(y, i):
        y = torch.sin(y)
        (z,) = for_loop(2, torch.tanh, [y])
        return cond(i % 2 == 0, torch.exp, [z], torch.cos, [z])[0] * net.w, i + 1

    return for_loop(3, body, [x, torch.zeros((), dtype=torch.int32)])[0]


def expected_anchors(net, x):
    """Return by name what eager PyTorch computes: iterations are stacked in front."""
    found = {name: [] for name in ("Sin:0", "Tanh:0", "Exp:0", "Cos:0")}
    for i in range(3):
        x = torch.sin(x)
        found["Sin:0"].append(x)
        found["Tanh:0"].append(torch.stack([x.tanh(), x.tanh().tanh()]))
        x = x.tanh().tanh()
        taken, other = (("Exp:0", "Cos:0"), ("Cos:0", "Exp:0"))[i % 2]
        found[taken].append(x.exp() if taken == "Exp:0" else x.cos())
        found[other].append(torch.zeros_like(x))
        x = found[taken][-1] * net.w
    return {name: torch.stack(values).detach() for name, values in found.items()}


@pytest.mark.parametrize("training", [True, False])
def test_names(training):
    net = Net(anchored)
    device = train(net) if training else poptorch.inferenceModel(net.eval(), make_options())
    device(sample())
    names = {"Loop:0", "If:0", "Loop:0/1", "Sin:0", "Tanh:0", "Exp:0", "Cos:0"}
    assert names <= set(device.getTensorNames())


@pytest.mark.parametrize("mode", [OutputMode.All, OutputMode.Final, OutputMode.Sum])
@pytest.mark.parametrize("training", [True, False])
def test_anchors(mode, training):
    net = Net(anchored)
    x = sample(2, 4)
    parts = [expected_anchors(net, part) for part in x.chunk(2)]
    options = make_options(2)
    for name in parts[0]:
        options.anchorTensor(name, name, mode)
    if training:
        device = poptorch.trainingModel(net, options, torch.optim.SGD(net.parameters(), lr=0.0))
    else:
        device = poptorch.inferenceModel(net.eval(), options)
    device(x)
    for name in parts[0]:
        both = [part[name] for part in parts]
        expected = {
            OutputMode.All: lambda both=both: torch.cat(both),
            OutputMode.Final: lambda both=both: both[-1],
            OutputMode.Sum: lambda both=both: both[0] + both[1],
        }[mode]()
        torch.testing.assert_close(device.getAnchoredTensor(name), expected, msg=name)


def test_the_values_are_the_same_with_anchors():
    results = []
    for names in ([], ["Sin:0", "Tanh:0", "Exp:0"]):
        options = make_options()
        for name in names:
            options.anchorTensor(name, name)
        net = Net(anchored)
        device = train(net, options)
        results.append([device(sample()) for _ in range(2)])
        device.copyWeightsToHost()
        results[-1].append([net.w.detach()])
    for ours, others in zip(*results, strict=True):
        assert all(map(torch.equal, ours, others))


# --- Files -----------------------------------------------------------------------------------


def with_everything(net, x):
    def body(y):
        sides = lambda a: torch.tanh(a * net.w), lambda a: F.dropout(net.fc(a), 0.5)
        return cond(y.sum() > 0, sides[0], [y], sides[1], [y])[0]

    return for_loop(4, body, [x])


def test_saved_programs(tmp_path):
    net = Net(with_everything)
    device = train(net, make_options(seed=3))
    device.compileAndExport(str(tmp_path / "program.pop"), sample())
    expected = device(sample())
    again = train(Net(with_everything), make_options(seed=3))
    again.loadExecutable(str(tmp_path / "program.pop"))
    assert all(map(torch.equal, again(sample()), expected))
    assert "loop(" in str(device.program()) and "branch(" in str(device.program())


def test_the_executable_cache(tmp_path):
    results = []
    for _ in range(2):
        options = make_options(seed=3)
        options.enableExecutableCaching(str(tmp_path))
        results.append(train(Net(with_everything), options)(sample()))
    assert all(map(torch.equal, *results))
    assert list(tmp_path.iterdir())


# --- Stages and recomputation ----------------------------------------------------------------


def two_stages(net, x):
    poptorch.Block.start("first", ipu_id=0)
    h = poptorch.recomputationCheckpoint(net.fc(x))
    g = torch.sin(h)
    poptorch.Block.start("second", ipu_id=1)
    (y,) = for_loop(3, lambda y: torch.tanh(net.layer_norm(y) * net.w + g), [h])
    return net.out(torch.sin(y))


def a_stage_begun_inside(net, x):
    poptorch.Block.start("first", ipu_id=0)
    h = net.fc(x)

    def body(y):
        poptorch.Block.start("second", ipu_id=1)
        return torch.tanh(net.fc(y))

    return net.out(for_loop(2, body, [h])[0])


@pytest.mark.parametrize("function", [two_stages, a_stage_begun_inside])
@pytest.mark.parametrize("recomputes", [False, True])
def test_pipelines(function, recomputes):
    loop = Loop(2, 3)
    options = loop.options()
    if recomputes:
        options._Popart.set("autoRecomputation", 3)
    check_training(function, sample(24, 4), loop, options=options)


def test_a_loop_that_prints_is_not_repeated_by_recomputation(capfd):
    options = make_options()
    options._Popart.set("autoRecomputation", 4)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(4, 4)

        def forward(self, x):
            def body(y):
                return poptorch.ipu_print_tensor(torch.sin(y), "y", print_gradient=False)

            (y,) = poptorch.for_loop(3, body, [self.fc(x)])
            return poptorch.identity_loss(y.exp() * y, "mean")

    net = Model()
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1)
    model = poptorch.trainingModel(net, options, optimizer)
    x = torch.randn(2, 4)
    model.compile(x)
    capfd.readouterr()
    model(x)
    assert capfd.readouterr().err.count("y: (") == 3


# --- Options ---------------------------------------------------------------------------------


def test_stochastic_rounding_in_a_body():
    options = make_options(seed=1)
    options.Precision.enableStochasticRounding(True)
    net = Net(lambda net, x: for_loop(50, lambda y: y + 0.0001, [x])).half().eval()
    (y,) = poptorch.inferenceModel(net, options)(torch.ones(4000).half())
    # Rounded to nearest, nothing would ever be added.
    assert abs(y.float().mean() - 1.005) < 0.001


def test_automatic_loss_scaling():
    options = make_options()
    options.Training.setAutomaticLossScaling(True)
    net = Net(lambda net, x: for_loop(3, lambda y: torch.tanh(net.fc(y)), [x])).half()
    device = poptorch.trainingModel(net, options, torch.optim.SGD(net.parameters(), lr=0.1))
    losses = [device(sample().half())[-1].item() for _ in range(5)]
    assert all(a > b > 0 for a, b in itertools.pairwise(losses))
