"""``executor.anchor_axes``: reshaped to its axes, an anchored tensor has eager PyTorch's values."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import OutputMode
from popsim_torch.enums import PipelineSchedule
from tests.options import make_options

D, GA, SIZE, RATE = 3, 8, 2, 0.125
NAMES = {
    "gradient": "Gradient___a.weight",
    "weight": "a.weight",
    "updated": "UpdatedVar___a.weight",
    "hidden": "Tanh:0",
    "stashed": "Stashed___Tanh:0",
    "restored": "Restored___Tanh:0",
    "loss": "IdentityLoss:0",
}
OWN = {"gradient": (5, 4), "weight": (5, 4), "updated": (5, 4), "loss": ()}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        with poptorch.Block("a", ipu_id=0):
            hidden = self.a(x).tanh()
        with poptorch.Block("b", ipu_id=1):
            return hidden, poptorch.identity_loss(self.b(hidden).square(), "mean")


def eager(x):
    """Return the values of each micro-batch, by short name, with axes for D and GA."""
    net = Net()
    found = {name: [] for name in NAMES}
    for update in x.reshape(D, GA, SIZE, 4):
        net.zero_grad()
        before = net.a.weight.detach().clone()
        for micro_batch in update:
            earlier = 0 if net.a.weight.grad is None else net.a.weight.grad.clone()
            hidden = net.a(micro_batch).tanh()
            loss = net.b(hidden).square().mean()
            loss.backward()
            found["gradient"].append(net.a.weight.grad - earlier)
            found["loss"].append(loss.detach())
            for name in ("hidden", "stashed", "restored"):
                found[name].append(hidden.detach())
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= RATE * parameter.grad / GA
        found["weight"] += [before] * GA
        found["updated"] += [net.a.weight.detach().clone()] * GA
    return {
        name: torch.stack(values).reshape(D, GA, *values[0].shape) for name, values in found.items()
    }


def run(schedule, mode, names):
    options = make_options(D, GA).pipelineSchedule(schedule)
    for name in names:
        period = (2,) if mode == OutputMode.EveryN else ()
        options.anchorTensor(name, NAMES[name], mode, *period)
    net = Net()
    training = poptorch.trainingModel(net, options, torch.optim.SGD(net.parameters(), lr=RATE))
    torch.manual_seed(1)
    x = torch.randn(D * GA * SIZE, 4)
    training(x)
    return training, eager(x)


@pytest.mark.parametrize("mode", [OutputMode.All, OutputMode.Sum, OutputMode.Final])
@pytest.mark.parametrize("schedule", list(PipelineSchedule))
def test_values_have_these_axes_on_every_schedule(schedule, mode):
    names = [
        name
        for name in NAMES
        if schedule != PipelineSchedule.Sequential or name not in ("stashed", "restored")
    ]
    training, expected = run(schedule, mode, names)
    for name in names:
        axes, one = training.anchor_axes(name), expected[name]
        own = [(f"dimension {i}", size) for i, size in enumerate(OWN.get(name, (SIZE, 5)))]
        value = training.getAnchoredTensor(name).reshape(axes.sizes)
        if mode == OutputMode.All:
            assert axes == (
                ("device iteration", D),
                ("micro-batch", GA),
                ("replica", 1),
                *own,
            )
            # The order of micro-batches is that of the call.
            torch.testing.assert_close(value[:, :, 0], one, rtol=1e-5, atol=1e-6)
            continue
        assert axes == (("replica", 1), *own)
        last = one.sum((0, 1)) if mode == OutputMode.Sum else one[-1, -1]
        torch.testing.assert_close(value[0], last, rtol=1e-5, atol=1e-5)


def test_every_n_keeps_some_device_iterations():
    names = ["gradient", "weight", "hidden"]
    training, expected = run(PipelineSchedule.Sequential, OutputMode.EveryN, names)
    for name in names:
        axes = training.anchor_axes(name)
        assert axes.names[:3] == ("device iteration", "micro-batch", "replica")
        assert axes.sizes[:3] == (1, GA, 1)
        value = training.getAnchoredTensor(name).reshape(axes.sizes)
        torch.testing.assert_close(value[0, :, 0], expected[name][1], rtol=1e-5, atol=1e-6)


def test_inference_has_a_micro_batch_for_each_device_iteration():
    options = (
        make_options(4).anchorTensor("hidden", "Tanh:0").pipelineSchedule(PipelineSchedule.Grouped)
    )
    inference = poptorch.inferenceModel(Net(), options)
    x = torch.randn(4 * SIZE, 4)
    hidden, _ = inference(x)
    axes = inference.anchor_axes("hidden")
    assert str(axes) == (
        "device iteration: 4, micro-batch: 1, replica: 1, dimension 0: 2, dimension 1: 5"
    )
    value = inference.getAnchoredTensor("hidden").reshape(axes.sizes)
    assert torch.equal(value[:, 0, 0], hidden.reshape(4, SIZE, 5))


class Looped(nn.Module):
    def forward(self, x):
        def inner(x):
            return poptorch.for_loop(2, lambda y: [y.sigmoid()], [x.tanh()])

        return poptorch.for_loop(3, inner, [x])[0]


def test_tensors_of_loops_have_an_axis_for_the_iterations():
    plain = poptorch.inferenceModel(Looped(), make_options(4))
    plain.compile(torch.zeros(8, 5))
    names = plain.getTensorNames("*Tanh*") + plain.getTensorNames("*Sigmoid*")
    options = make_options(4)
    options.anchorTensor("tanh", names[0], OutputMode.All)
    options.anchorTensor("sigmoid", names[1], OutputMode.All)
    model = poptorch.inferenceModel(Looped(), options)
    x = torch.randn(8, 5)
    model(x)
    for name, iterations in (("tanh", (3,)), ("sigmoid", (3, 2))):
        axes = model.anchor_axes(name)
        assert axes.names[3:] == (*["iteration"] * len(iterations), "dimension 0", "dimension 1")
        assert axes.sizes == (4, 1, 1, *iterations, 2, 5)
        value = model.getAnchoredTensor(name).reshape(axes.sizes)[:, 0, 0]
        found = x.reshape(4, 2, 5)
        for i in range(3):
            found = found.tanh()
            if name == "tanh":
                torch.testing.assert_close(value[:, i], found)
            for j in range(2):
                found = found.sigmoid()
                if name == "sigmoid":
                    torch.testing.assert_close(value[:, i, j], found)


def test_anchors_of_a_device_loop_have_its_iterations():
    options = make_options().anchorTensor("squares", "Mul:0", OutputMode.All)

    @poptorch.function(options=options)
    def run(x):
        return poptorch.repeat(5, lambda x: x * x, [x])

    x = torch.rand(3)
    run(x)
    (program,) = run.programs
    axes = program.anchor_axes("squares")
    assert axes[0] == ("iteration", 5) and axes.sizes == (5, 1, 1, 3)
    value = program.getAnchoredTensor("squares").reshape(axes.sizes)
    torch.testing.assert_close(value[:, 0, 0], torch.stack([x**2**i for i in range(1, 6)]))


def test_anchors_of_a_fit_have_the_axes_of_its_steps():
    options = make_options(1, 2).anchorTensor("g", "Gradient___a.weight", OutputMode.All)

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 1)

        def forward(self, x, y):
            return nn.functional.mse_loss(self.a(x), y)

    net = Plain()
    training = poptorch.trainingModel(net, options, torch.optim.SGD(net.parameters(), lr=0.1))
    data = [(torch.randn(2, 4), torch.randn(2, 1)) for _ in range(4)]
    poptorch.fit(training, data, epochs=1)
    value, axes = training.getAnchoredTensor("g"), training.anchor_axes("g")
    assert axes.names[1:] == ("micro-batch", "replica", "dimension 0", "dimension 1")
    assert axes.sizes[1:] == (2, 1, 1, 4)
    assert value.reshape(axes.sizes).shape == axes.sizes
    with pytest.raises(AssertionError, match=r"anchor_axes: No tensor with name 'h'.*'g'"):
        training.anchor_axes("h")


def test_mistakes_are_explained():
    options = make_options().anchorTensor("hidden", "Tanh:0")
    model = poptorch.inferenceModel(Net(), options)
    with pytest.raises(poptorch.Error, match="anchor_axes: the model has not been compiled"):
        model.anchor_axes("hidden")
    sequential = options.clone().pipelineSchedule(PipelineSchedule.Sequential)
    model = poptorch.inferenceModel(Net(), sequential)
    model.compile(torch.zeros(2, 4))
    assert model.anchor_axes("hidden").sizes == (1, 1, 1, 2, 5)  # also before the first run
    with pytest.raises(AssertionError, match=r"anchor_axes: No tensor with name 'hiden'.*'hidden'"):
        model.anchor_axes("hiden")


@pytest.mark.parametrize("mode", [OutputMode.All, OutputMode.Final])
def test_replicas_have_entries_of_their_own(mode):
    options = make_options(D, GA).replicationFactor(2).autoRoundNumIPUs(True)
    options.pipelineSchedule(PipelineSchedule.Grouped).anchorTensor("input", "input", mode)
    net = Net()
    training = poptorch.trainingModel(net, options, torch.optim.SGD(net.parameters(), lr=RATE))
    x = torch.randn(D * GA * 2 * SIZE, 4)
    training(x)
    axes = training.anchor_axes("input")
    value = training.getAnchoredTensor("input").reshape(axes.sizes)
    expected = x.reshape(D, GA, 2, SIZE, 4)
    assert torch.equal(value, expected if mode == OutputMode.All else expected[-1, -1])
    assert axes.names[-3:] == ("replica", "dimension 0", "dimension 1")
