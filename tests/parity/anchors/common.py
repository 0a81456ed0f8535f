"""What the tests of anchors share: models, and eager PyTorch's value of every tensor."""

import copy

import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import OutputMode
from tests.options import make_options

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
            used = {name: p.detach().clone() for name, p in net.named_parameters()}
            optimizer.step()
            for _ in range(ga):
                self._record(used.keys(), used.values())
                self._record_update(net, optimizer)

    def _record(self, names, tensors):
        for name, tensor in zip(names, tensors, strict=True):
            self.values.setdefault(name, []).append(tensor.detach().clone())

    @staticmethod
    def _gradients(net, loss):
        return torch.autograd.grad(loss, net.seen, retain_graph=True)

    def _record_update(self, net, optimizer):
        for name, parameter in net.named_parameters():
            self._record([f"UpdatedVar___{name}"], [parameter])
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


STATES = ("Accl1", "Accl2", "Step")
