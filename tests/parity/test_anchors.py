"""Anchors return what eager PyTorch computes, whatever the mode, D and GA."""

import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import OutputMode

MICRO_BATCH = 4
LEARNING_RATE = 0.125
LOOPS = [(1, 1), (2, 1), (1, 3), (4, 2)]
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}

WEIGHTS = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
ACTIVATIONS = ("fc1/Gemm:0", "act/Tanh:0", "fc2/Gemm:0", "loss/Nll:0")
INPUTS = ("input", "input/1")


class Net(nn.Module):
    """An MLP whose every activation has a name that is easy to tell."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(5, 4)
        self.act = nn.Tanh()
        self.fc2 = nn.Linear(4, 3)
        self.loss = nn.NLLLoss()

    def forward(self, x, y):
        hidden = self.fc1(x)
        active = self.act(hidden)
        out = self.fc2(active)
        loss = self.loss(torch.log_softmax(out, 1), y)
        self.seen = (hidden, active, out, loss)
        return out, loss


def make_net(seed=3):
    torch.manual_seed(seed)
    return Net()


def make_batch(d, ga, seed=4):
    torch.manual_seed(seed)
    count = d * ga * MICRO_BATCH
    return torch.randn(count, 5), torch.randint(0, 3, (count,))


def make_options(d=1, ga=1):
    options = poptorch.Options()
    options.showCompilationProgressBar(False)
    options.deviceIterations(d)
    options.Training.gradientAccumulation(ga)
    return options


class Eager:
    """Runs a training call in eager PyTorch and writes down every tensor with a name.

    ``values[name]`` has D * GA entries, one per micro-batch.
    """

    def __init__(self, net, optimizer, d, ga, x, y):
        self.values: dict[str, list[torch.Tensor]] = {}
        for i in range(d):
            optimizer.zero_grad()
            total = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
            for a in range(ga):
                first = (i * ga + a) * MICRO_BATCH
                batch = x[first : first + MICRO_BATCH], y[first : first + MICRO_BATCH]
                self._record(INPUTS, (batch[0], batch[1].int()))
                _, loss = net(*batch)
                self._record(ACTIVATIONS, net.seen)
                self._record([f"Gradient___{n}" for n in ACTIVATIONS], self._gradients(net, loss))
                weights = dict(net.named_parameters())
                gradients = torch.autograd.grad(loss, list(weights.values()))
                for name, gradient in zip(weights, gradients, strict=True):
                    self._record([f"Gradient___{name}"], [gradient])
                    total[name] += gradient
                    self._record([f"Accum___{name}"], [total[name]])
            for name, parameter in net.named_parameters():
                parameter.grad = total[name] / ga
            optimizer.step()
            for _ in range(ga):
                self._record_update(net, optimizer)

    def _record(self, names, tensors):
        for name, tensor in zip(names, tensors, strict=True):
            self.values.setdefault(name, []).append(tensor.detach().clone())

    @staticmethod
    def _gradients(net, loss):
        return torch.autograd.grad(loss, net.seen, retain_graph=True)

    def _record_update(self, net, optimizer):
        for name, parameter in net.named_parameters():
            self._record([name, f"UpdatedVar___{name}"], [parameter, parameter])
            state = optimizer.state[parameter]
            if "exp_avg" in state:
                self._record([f"Accl1___{name}"], [state["exp_avg"]])
                self._record([f"Accl2___{name}"], [state["exp_avg_sq"]])
                self._record([f"Step___{name}"], [state["step"].reshape(1)])

    def expected(self, name, mode, period, d, ga):
        """Return what an anchor of a tensor has to be."""
        values = self.values[name]
        if mode == OutputMode.Final:
            return values[-1]
        if mode == OutputMode.Sum:
            return torch.stack([v.double() for v in values]).sum(0).to(values[0].dtype)
        step = period if mode == OutputMode.EveryN else 1
        kept = [values[i * ga + a] for i in range(step - 1, d, step) for a in range(ga)]
        if not kept[0].shape:
            return torch.stack(kept) if len(kept) > 1 else kept[0]
        return torch.cat(kept)


def modes_of(d):
    """Return every mode and period that is valid with D device iterations."""
    modes = [(OutputMode.All, 1), (OutputMode.Sum, 1), (OutputMode.Final, 1)]
    return modes + [(OutputMode.EveryN, n) for n in range(1, d + 1) if d % n == 0]


def short_name(name, mode, period):
    return f"{name} {mode.name} {period}"


class Case:
    """One trained model with every tensor anchored in every mode, beside its eager twin."""

    def __init__(self, d, ga, names, adam):
        self.d, self.ga = d, ga
        net = make_net()
        twin = copy.deepcopy(net)
        options = make_options(d, ga)
        for name in names:
            for mode, period in modes_of(d):
                options.anchorTensor(short_name(name, mode, period), name, mode, period)
        if adam:
            optimizer = poptorch.optim.Adam(net.parameters(), lr=LEARNING_RATE)
            eager = torch.optim.Adam(twin.parameters(), lr=LEARNING_RATE)
        else:
            optimizer = poptorch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
            eager = torch.optim.SGD(twin.parameters(), lr=LEARNING_RATE)
        self.model = poptorch.trainingModel(net, options, optimizer)
        # Two calls: what the first one leaves behind must not show in the second.
        for seed in (4, 5):
            x, y = make_batch(d, ga, seed)
            self.model(x, y)
            self.eager = Eager(twin, eager, d, ga, x, y)

    def check(self, name, **tolerance):
        for mode, period in modes_of(self.d):
            expected = self.eager.expected(name, mode, period, self.d, self.ga)
            actual = self.model.getAnchoredTensor(short_name(name, mode, period))
            torch.testing.assert_close(
                actual,
                expected,
                msg=lambda text, mode=mode, period=period: f"{mode.name} {period}: {text}",
                **(tolerance or TOLERANCE),
            )


SGD_NAMES = (
    *INPUTS,
    *ACTIVATIONS,
    *(f"Gradient___{name}" for name in (*ACTIVATIONS, *WEIGHTS)),
    *WEIGHTS,
    *(f"UpdatedVar___{name}" for name in WEIGHTS),
)


@pytest.fixture(scope="module", params=LOOPS, ids=lambda p: f"D{p[0]}xGA{p[1]}")
def sgd(request):
    return Case(*request.param, SGD_NAMES, adam=False)


STATES = ("Accl1", "Accl2", "Step")


@pytest.fixture(scope="module", params=LOOPS, ids=lambda p: f"D{p[0]}xGA{p[1]}")
def adam(request):
    return Case(*request.param, [f"{s}___{w}" for s in STATES for w in WEIGHTS], adam=True)


@pytest.mark.parametrize("name", INPUTS)
def test_inputs(sgd, name):
    sgd.check(name, rtol=0, atol=0)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(sgd, name):
    sgd.check(name)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_of_activations(sgd, name):
    sgd.check(f"Gradient___{name}")


@pytest.mark.parametrize("name", WEIGHTS)
def test_gradients_of_weights(sgd, name):
    sgd.check(f"Gradient___{name}")


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_hold_their_value_after_each_update(sgd, name):
    sgd.check(name)


@pytest.mark.parametrize("name", WEIGHTS)
def test_updated_weights(sgd, name):
    sgd.check(f"UpdatedVar___{name}")


@pytest.mark.parametrize("state", STATES)
def test_optimizer_state(adam, state):
    for weight in WEIGHTS:
        adam.check(f"{state}___{weight}", rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", [OutputMode.All, OutputMode.EveryN, OutputMode.Sum])
def test_accumulators_show_the_running_sum(mode):
    d, ga, name = 4, 2, "Accum___fc1.weight"
    net = make_net()
    twin = copy.deepcopy(net)
    options = make_options(d, ga)
    options.anchorTensor("accum", name, mode, 2)
    model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.125))
    x, y = make_batch(d, ga)
    model(x, y)
    eager = Eager(twin, torch.optim.SGD(twin.parameters(), lr=0.125), d, ga, x, y)
    expected = eager.expected(name, mode, 2, d, ga)
    torch.testing.assert_close(model.getAnchoredTensor("accum"), expected, **TOLERANCE)


@pytest.mark.parametrize("d, ga", [(1, 3), (4, 2)])
def test_the_final_accumulator_is_zero(d, ga):
    net = make_net()
    options = make_options(d, ga)
    options.anchorTensor("accum", "Accum___fc2.bias", OutputMode.Final)
    model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.125))
    model(*make_batch(d, ga))
    assert torch.equal(model.getAnchoredTensor("accum"), torch.zeros(3))


def test_the_stages_of_combined_sgd():
    """One tensor is accumulator and velocity: ``v = mm * v + sum of gradients / GA``."""
    d, ga, momentum = 2, 3, 0.5
    net = make_net()
    twin = copy.deepcopy(net)
    options = make_options(d, ga)
    names = [f"{s}___fc1.weight" for s in ("Accl", "AcclIntoReduce", "AcclOutOfAcclUpdate")]
    for name in names:
        options.anchorTensor(name, name, OutputMode.All)
    optimizer = poptorch.optim.SGD(
        net.parameters(), lr=0.125, momentum=momentum, use_combined_accum=True
    )
    model = poptorch.trainingModel(net, options, optimizer)
    x, y = make_batch(d, ga)
    model(x, y)
    eager = torch.optim.SGD(twin.parameters(), lr=0.125, momentum=momentum)
    running = Eager(twin, eager, d, ga, x, y).values["Accum___fc1.weight"]
    velocity = torch.zeros_like(running[0])
    partial, updated = [], []
    for i in range(d):
        partial += [velocity + running[i * ga + a] / ga for a in range(ga)]
        velocity = momentum * partial[-1]
        updated += [velocity] * ga
    into, out = torch.cat(partial), torch.cat(updated)
    torch.testing.assert_close(model.getAnchoredTensor(names[1]), into, **TOLERANCE)
    torch.testing.assert_close(model.getAnchoredTensor(names[2]), out, **TOLERANCE)
    torch.testing.assert_close(model.getAnchoredTensor(names[0]), out, **TOLERANCE)


def test_an_accumulator_of_running_means_keeps_the_last_one():
    d, ga = 2, 3
    net = make_net()
    twin = copy.deepcopy(net)
    options = make_options(d, ga)
    options.Training.setMeanAccumulationAndReplicationReductionStrategy(
        poptorch.MeanReductionStrategy.Running
    )
    options.anchorTensor("final", "Accum___fc1.weight", OutputMode.Final)
    options.anchorTensor("every", "Accum___fc1.weight", OutputMode.All)
    model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.125))
    x, y = make_batch(d, ga)
    model(x, y)
    eager = Eager(twin, torch.optim.SGD(twin.parameters(), lr=0.125), d, ga, x, y)
    sums = eager.values["Accum___fc1.weight"]
    means = [total / (i % ga + 1) for i, total in enumerate(sums)]
    torch.testing.assert_close(model.getAnchoredTensor("every"), torch.cat(means), **TOLERANCE)
    torch.testing.assert_close(model.getAnchoredTensor("final"), means[-1], **TOLERANCE)


@pytest.mark.parametrize("first", [OutputMode.Final, OutputMode.All], ids=lambda m: m.name)
def test_accumulators_anchored_in_two_modes_do_not_depend_on_the_order(first):
    second = OutputMode.All if first == OutputMode.Final else OutputMode.Final
    net = make_net()
    options = make_options(2, 3)
    for mode in (first, second):
        options.anchorTensor(mode.name, "Accum___fc1.bias", mode)
    model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.125))
    model(*make_batch(2, 3))
    running = model.getAnchoredTensor("All").view(2, 3, 4)
    assert (running[:, :, 0] != 0).all()
    assert torch.equal(model.getAnchoredTensor("Final"), torch.zeros(4))


@pytest.mark.parametrize("d, ga", LOOPS)
def test_optimizer_scalars_are_repeated_for_every_micro_batch(d, ga):
    names = {
        "learningRate___specific___fc1.weight": 0.25,
        "weightDecay___specific___fc1.weight": 0.5,
        "adamBeta1___specific___fc1.weight": 0.75,
        "adamBeta2___specific___fc1.weight": 0.875,
        "lossScaling_FLOAT": 4.0,
        "adamGradientScaling___specific___fc1.weight": 4.0 * ga,
    }
    net = make_net()
    options = make_options(d, ga)
    for name in names:
        options.anchorTensor(f"{name} all", name, OutputMode.All)
        options.anchorTensor(f"{name} final", name, OutputMode.Final)
        options.anchorTensor(f"{name} sum", name, OutputMode.Sum)
    optimizer = poptorch.optim.Adam(
        net.parameters(), lr=0.25, weight_decay=0.5, betas=(0.75, 0.875), loss_scaling=4.0
    )
    model = poptorch.trainingModel(net, options, optimizer)
    model(*make_batch(d, ga))
    for name, value in names.items():
        every = torch.full((d * ga,), value) if d * ga > 1 else torch.tensor(value)
        assert torch.equal(model.getAnchoredTensor(f"{name} all"), every)
        assert torch.equal(model.getAnchoredTensor(f"{name} final"), torch.tensor(value))
        assert torch.equal(model.getAnchoredTensor(f"{name} sum"), torch.tensor(value * d * ga))


def test_a_scalar_shows_the_value_of_this_call():
    name = "scaledLearningRate0___specific___fc2.bias"
    net = make_net()
    options = make_options()
    options.anchorTensor("lr", name)
    model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.5))
    x, y = make_batch(1, 1)
    model(x, y)
    assert float(model.getAnchoredTensor("lr")) == 0.5
    model.setOptimizer(poptorch.optim.SGD(net.parameters(), lr=0.25))
    assert float(model.getAnchoredTensor("lr")) == 0.5
    model(x, y)
    assert float(model.getAnchoredTensor("lr")) == 0.25


def test_gradients_are_multiplied_by_the_loss_scale():
    x, y = make_batch(1, 1)

    def gradient(scale):
        net = make_net()
        options = make_options()
        options.anchorTensor("weight", "Gradient___fc1.weight")
        options.anchorTensor("seed", "Gradient___loss/Nll:0")
        optimizer = poptorch.optim.SGD(net.parameters(), lr=0.125, loss_scaling=scale)
        model = poptorch.trainingModel(net, options, optimizer)
        loss = model(x, y)[1]
        return model.getAnchoredTensor("weight"), model.getAnchoredTensor("seed"), loss

    plain, scaled = gradient(1.0), gradient(8.0)
    torch.testing.assert_close(scaled[0], plain[0] * 8, rtol=1e-6, atol=0)
    assert (float(plain[1]), float(scaled[1])) == (1.0, 8.0)
    assert torch.equal(scaled[2], plain[2])


# Registration


def test_one_tensor_under_two_names_and_as_an_output():
    options = make_options(2, 1)
    options.outputMode(OutputMode.Final)
    options.anchorTensor("every", "fc2/Gemm:0", OutputMode.All)
    options.anchorTensor("again", "fc2/Gemm:0", OutputMode.All)
    options.anchorTensor("total", "fc2/Gemm:0", OutputMode.Sum)
    net = make_net()
    model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.125))
    out, _ = model(*make_batch(2, 1))
    every = model.getAnchoredTensor("every")
    assert torch.equal(every, model.getAnchoredTensor("again"))
    assert torch.equal(every[MICRO_BATCH:], out)
    total = every[:MICRO_BATCH] + every[MICRO_BATCH:]
    torch.testing.assert_close(model.getAnchoredTensor("total"), total, **TOLERANCE)


def test_a_short_name_registered_again_is_replaced():
    options = make_options()
    options.anchorTensor("it", "fc1/Gemm:0")
    options.anchorTensor("it", "fc2/Gemm:0")
    net = make_net()
    model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.125))
    out, _ = model(*make_batch(1, 1))
    assert torch.equal(model.getAnchoredTensor("it"), out)


@pytest.mark.parametrize("mode", [OutputMode.All, OutputMode.Sum, OutputMode.EveryN])
def test_without_a_mode_an_anchor_takes_that_of_the_model(mode):
    options = make_options(4, 1)
    options.outputMode(mode, 2)
    options.anchorTensor("it", "fc2/Gemm:0")
    net = make_net()
    model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.125))
    out, _ = model(*make_batch(4, 1))
    assert torch.equal(model.getAnchoredTensor("it"), out)


def test_the_default_mode_is_final_for_training_and_all_for_inference():
    options = make_options(3)
    options.anchorTensor("it", "fc1/Gemm:0")
    net = make_net()
    x, y = make_batch(3, 1)
    inference = poptorch.inferenceModel(net, options)
    inference(x, y)
    assert inference.getAnchoredTensor("it").shape == (3 * MICRO_BATCH, 4)
    training = poptorch.trainingModel(net, options)
    training(x, y)
    assert training.getAnchoredTensor("it").shape == (MICRO_BATCH, 4)


def test_an_anchored_tensor_is_a_copy():
    options = make_options()
    options.anchorTensor("w", "fc1.weight")
    net = make_net()
    model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.125))
    model(*make_batch(1, 1))
    first = model.getAnchoredTensor("w")
    kept = first.clone()
    model(*make_batch(1, 1, seed=5))
    assert torch.equal(first, kept)
    first.zero_()
    assert not torch.equal(model.getAnchoredTensor("w"), first)


# Anchors observe, they do not disturb


@pytest.mark.parametrize("d, ga", [(1, 1), (1, 3), (4, 2)])
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_anchors_never_change_results(d, ga, optimizer):
    def train(anchored):
        net = make_net()
        options = make_options(d, ga)
        options.outputMode(OutputMode.All)
        if anchored:
            for i, name in enumerate(all_names):
                options.anchorTensor(f"a{i}", name, list(OutputMode)[(0, 2, 3)[i % 3]])
        kind = getattr(poptorch.optim, optimizer)
        model = poptorch.trainingModel(net, options, kind(net.parameters(), lr=0.125))
        results = [model(*make_batch(d, ga, seed)) for seed in range(3)]
        return model.getTensorNames(), results, net.state_dict()

    all_names, outputs, weights = train(anchored=False)
    _, anchored_outputs, anchored_weights = train(anchored=True)
    for ours, theirs in zip(outputs, anchored_outputs, strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
    for name, weight in weights.items():
        assert torch.equal(weight, anchored_weights[name]), name


@pytest.mark.parametrize("name", ["input", "fc/Gemm:0", "Gradient___fc/Gemm:0", "fc.weight"])
def test_anchors_never_change_dropout(name):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            x = nn.functional.dropout(self.fc(x), 0.5)
            x = nn.functional.dropout(x + torch.rand_like(x), 0.5)
            return x, poptorch.identity_loss(x, "sum")

    def train(anchored):
        torch.manual_seed(0)
        net = Net()
        options = make_options(1, 2)
        options.randomSeed(5)
        if anchored:
            options.anchorTensor("it", name, OutputMode.All)
        model = poptorch.trainingModel(net, options)
        x = torch.randn(16, 4)
        return [model(x)[0] for _ in range(2)]

    for ours, theirs in zip(train(False), train(True), strict=True):
        assert torch.equal(ours, theirs)


def test_every_listed_name_can_be_anchored():
    net = make_net()
    x, y = make_batch(2, 3)
    plain = poptorch.trainingModel(net, make_options(2, 3))
    plain.compile(x, y)
    names = plain.getTensorNames()
    plain.destroy()
    options = make_options(2, 3)
    for name in names:
        options.anchorTensor(name, name, OutputMode.All)
    model = poptorch.trainingModel(net, options)
    model(x, y)
    for name in names:
        assert model.getAnchoredTensor(name).isfinite().all(), name


# Element types


class Mixed(nn.Module):
    """Activations of every element type."""

    def forward(self, half, whole, truth):
        doubled = half * 2
        with poptorch.NameScope("index"):
            index = (half + 1).argmax(1)
        with poptorch.NameScope("count"):
            count = whole + whole
        with poptorch.NameScope("truth"):
            opposite = ~truth
        return doubled, index, count, opposite


def test_element_types_of_anchors():
    options = make_options()
    inputs = (
        torch.randn(2, 3).half(),
        torch.tensor([2**20, -7]),
        torch.tensor([True, False]),
    )
    names = ("input", "input/1", "input/2")
    plain = poptorch.inferenceModel(Mixed(), make_options())
    outputs = plain(*inputs)
    names = [n for n in plain.getTensorNames() if not n.endswith("Constant:0")]
    for name in names:
        options.anchorTensor(name, name)
    model = poptorch.inferenceModel(Mixed(), options)
    model(*inputs)
    anchors = {name: model.getAnchoredTensor(name) for name in names}
    assert anchors["input"].dtype == torch.float16
    assert anchors["Mul:0"].dtype == torch.float16
    assert anchors["input/1"].dtype == torch.int32
    assert anchors["count/Add:0"].dtype == torch.int32
    assert anchors["index/ArgMax:0"].dtype == torch.int32
    assert anchors["input/2"].dtype == torch.bool
    assert torch.equal(anchors["Mul:0"], inputs[0] * 2)
    assert anchors["input/1"].tolist() == [2**20, -7]
    assert anchors["count/Add:0"].tolist() == [2**21, -14]
    assert torch.equal(anchors["index/ArgMax:0"].long(), inputs[0].argmax(1))
    assert anchors["input/2"].tolist() == [True, False]
    assert [out.dtype for out in outputs] == [
        torch.float16,
        torch.int32,
        torch.int32,
        torch.bool,
    ]


def test_half_gradients_and_weights_stay_half():
    torch.manual_seed(0)
    net = nn.Linear(4, 3).half()

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = net

        def forward(self, x):
            return poptorch.identity_loss(self.layer(x), "mean")

    wrapper = Wrapper()
    options = make_options(2, 2)
    for name in ("layer.weight", "Gradient___layer.weight", "layer/Gemm:0"):
        for mode in (OutputMode.All, OutputMode.Sum, OutputMode.Final):
            options.anchorTensor(f"{name} {mode.name}", name, mode)
    model = poptorch.trainingModel(
        wrapper, options, poptorch.optim.SGD(wrapper.parameters(), lr=0.5)
    )
    x = torch.randn(8, 4).half()
    model(x)
    for name in ("layer.weight", "Gradient___layer.weight", "layer/Gemm:0"):
        for mode in ("All", "Sum", "Final"):
            assert model.getAnchoredTensor(f"{name} {mode}").dtype == torch.float16
    gradient = model.getAnchoredTensor("Gradient___layer.weight All").view(4, 3, 4)
    expected = x.view(4, 2, 4).float().sum(1, keepdim=True).expand(4, 3, 4) / 6
    torch.testing.assert_close(gradient.float(), expected, rtol=5e-3, atol=5e-3)


def test_a_sum_of_half_values_is_rounded_once():
    class Identity(nn.Module):
        def forward(self, x):
            return x * 1

    options = make_options(8)
    options.anchorTensor("total", "Mul:0", OutputMode.Sum)
    model = poptorch.inferenceModel(Identity(), options)
    x = torch.tensor([2048.0, 1, 1, 1, 1, 1, 1, 2]).half().view(8, 1)
    model(x)
    assert model.getAnchoredTensor("total").tolist() == [[2056.0]]


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
@pytest.mark.parametrize("count", [1, 300])
def test_a_sum_of_integers_counts(dtype, count):
    class Flags(nn.Module):
        def forward(self, x):
            return (x > 0) if dtype == torch.bool else x.to(dtype)

    options = make_options(count)
    options.outputMode(OutputMode.Sum)
    name = "Greater:0" if dtype == torch.bool else "Cast:0" if dtype != torch.int32 else "input"
    options.anchorTensor("total", name, OutputMode.Sum)
    options.anchorTensor("last", name, OutputMode.Final)
    model = poptorch.inferenceModel(Flags(), options)
    low = 0 if dtype in (torch.bool, torch.uint8) else -100
    x = torch.randint(low, 100, (count, 50), dtype=torch.int32)
    out = model(x)
    expected = (x > 0 if dtype == torch.bool else x).sum(0, keepdim=True, dtype=torch.int32)
    for total in (out, model.getAnchoredTensor("total")):
        assert total.dtype == torch.int32
        assert torch.equal(total, expected)
    last = model.getAnchoredTensor("last")
    assert last.dtype == (torch.int32 if dtype == torch.int64 else dtype)


# Model outputs follow the same rules


OUTPUT_SHAPES = [
    (OutputMode.Final, 1, (MICRO_BATCH, 3), ()),
    (OutputMode.Sum, 1, (MICRO_BATCH, 3), ()),
    (OutputMode.All, 1, (8 * MICRO_BATCH, 3), (8,)),
    (OutputMode.EveryN, 1, (8 * MICRO_BATCH, 3), (8,)),
    (OutputMode.EveryN, 2, (4 * MICRO_BATCH, 3), (4,)),
    (OutputMode.EveryN, 4, (2 * MICRO_BATCH, 3), (2,)),
]


@pytest.mark.parametrize("mode, period, out_shape, loss_shape", OUTPUT_SHAPES)
def test_outputs_of_training(mode, period, out_shape, loss_shape):
    d, ga = 4, 2
    net = make_net()
    twin = copy.deepcopy(net)
    options = make_options(d, ga)
    options.outputMode(mode, period)
    model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.125))
    x, y = make_batch(d, ga)
    out, loss = model(x, y)
    eager = Eager(twin, torch.optim.SGD(twin.parameters(), lr=0.125), d, ga, x, y)
    assert (tuple(out.shape), tuple(loss.shape)) == (out_shape, loss_shape)
    for actual, name in ((out, "fc2/Gemm:0"), (loss, "loss/Nll:0")):
        expected = eager.expected(name, mode, period, d, ga)
        torch.testing.assert_close(actual, expected, **TOLERANCE)


@pytest.mark.parametrize("mode", [OutputMode.All, OutputMode.EveryN, OutputMode.Final])
def test_a_loss_of_a_single_micro_batch_is_zero_dimensional(mode):
    net = make_net()
    options = make_options()
    options.outputMode(mode, 1)
    model = poptorch.trainingModel(net, options)
    assert model(*make_batch(1, 1))[1].shape == ()


@pytest.mark.parametrize("mode, entries", [("All", [0, 1, 2, 3]), ("Final", [3]), ("Sum", None)])
def test_outputs_of_inference(mode, entries):
    net = make_net()
    x, y = make_batch(4, 1)
    options = make_options(4)
    options.outputMode(OutputMode[mode])
    out, loss = poptorch.inferenceModel(net, options)(x, y)
    with torch.no_grad():
        parts = [net(x[i : i + 4], y[i : i + 4]) for i in range(0, 16, 4)]
    if entries is None:
        expected = sum(p[0] for p in parts), sum(p[1] for p in parts)
    elif len(entries) == 1:
        expected = parts[3]
    else:
        expected = torch.cat([p[0] for p in parts]), torch.stack([p[1] for p in parts])
    torch.testing.assert_close(out, expected[0], **TOLERANCE)
    torch.testing.assert_close(loss, expected[1], **TOLERANCE)


def test_an_output_that_is_a_weight_is_what_forward_saw():
    class Shows(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return self.w, self.w.clone(), poptorch.identity_loss(x * self.w, "sum")

    net = Shows()
    model = poptorch.trainingModel(net, make_options(), poptorch.optim.SGD(net.parameters(), lr=1))
    weight, copied, _ = model(torch.ones(1, 2))
    assert weight.tolist() == [1.0, 1.0]
    assert copied.tolist() == [1.0, 1.0]
    assert net.w.tolist() == [0.0, 0.0]


def test_an_anchored_view_of_a_weight_is_a_forward_value():
    class Shows(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2, 1))

        def forward(self, x):
            with poptorch.NameScope("flat"):
                flat = self.w.reshape(2)
            return poptorch.identity_loss(x * flat, "sum")

    options = make_options(2)
    options.anchorTensor("flat", "flat/Reshape:0", OutputMode.All)
    options.anchorTensor("w", "w", OutputMode.All)
    net = Shows()
    model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=1))
    model(torch.ones(2, 2))
    assert model.getAnchoredTensor("flat").tolist() == [1.0, 1.0, 0.0, 0.0]
    assert model.getAnchoredTensor("w").flatten().tolist() == [0.0, 0.0, -1.0, -1.0]


class SetUp(nn.Module):
    """A weight beside work that is done once, before the first run."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, x):
        fixed = torch.arange(2.0, device=x.device).cumsum(0).cumsum(0)
        out = x * self.w + fixed
        return self.w, out, poptorch.identity_loss(out, "sum")


def test_a_weight_beside_setup_work_can_be_returned():
    model = poptorch.inferenceModel(SetUp(), make_options(2))
    weight, out, _ = model(torch.zeros(2, 2))
    assert weight.tolist() == [1.0] * 4
    assert out.tolist() == [[0.0, 1.0], [0.0, 1.0]]


def test_the_seed_of_the_loss_beside_setup_work_can_be_anchored():
    net = SetUp()
    options = make_options(2)
    options.anchorTensor("seed", "Gradient___IdentityLoss:0", OutputMode.All)
    options.anchorTensor("w", "w", OutputMode.All)
    optimizer = poptorch.optim.SGD(net.parameters(), lr=1.0, loss_scaling=4.0)
    model = poptorch.trainingModel(net, options, optimizer)
    model(torch.ones(2, 2))
    assert model.getAnchoredTensor("seed").tolist() == [4.0, 4.0]
    assert model.getAnchoredTensor("w").tolist() == [0.0, 0.0, -1.0, -1.0]


def test_a_buffer_cloned_before_it_changes_keeps_its_old_value():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x):
            before = self.count.clone()
            self.count.add_(1)
            return before, self.count, x

    model = poptorch.inferenceModel(Counts(), make_options(3))
    before, after, _ = model(torch.zeros(3, 1))
    assert before.tolist() == [0.0, 1.0, 2.0]
    assert after.tolist() == [1.0, 2.0, 3.0]


def test_constants_can_be_returned_and_anchored():
    class Constant(nn.Module):
        def forward(self, x):
            with poptorch.NameScope("fixed"):
                fixed = torch.ones(2, 2, device=x.device) + torch.ones(2, 2, device=x.device)
            return x, fixed

    options = make_options(3)
    options.anchorTensor("fixed", "fixed/Add:0", OutputMode.Sum)
    model = poptorch.inferenceModel(Constant(), options)
    _, fixed = model(torch.zeros(3, 1))
    assert torch.equal(fixed, torch.full((6, 2), 2.0))
    assert torch.equal(model.getAnchoredTensor("fixed"), torch.full((2, 2), 6.0))
