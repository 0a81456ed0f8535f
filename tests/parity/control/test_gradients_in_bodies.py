"""Gradients of what the bodies of loops and branches compute: names, anchors, queues, prints."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import OutputMode, cond, for_loop
from tests.options import make_options

TRIPS = 3


class Net(nn.Module):
    def __init__(self, loop):
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(3))
        self._loop = loop

    def forward(self, x):
        y = self._loop(self, x * self.w)
        return y, poptorch.identity_loss(y.square(), "sum")


def everything(net, x):
    """A loop with an inner loop, a branch and a layer of its own in each iteration."""

    def body(y, i):
        y = torch.sin(y)
        (z,) = for_loop(2, torch.tanh, [y])
        return cond(i % 2 == 0, torch.exp, [z], torch.cos, [z])[0] * net.w, i + 1

    return for_loop(TRIPS, body, [x, torch.zeros((), dtype=torch.int32, device="cpu")])[0]


def eager_gradients(net, x):
    """Return by name the gradients in eager PyTorch: iterations are stacked in front."""
    seen = {}

    def see(name, tensor):
        tensor.retain_grad()
        seen.setdefault(name, []).append(tensor)
        return tensor

    y = x * net.w
    for i in range(TRIPS):
        y = see("Sin:0", torch.sin(y))
        z = see("Tanh:0", torch.tanh(see("Tanh:0", torch.tanh(y))))
        taken, other = (("Exp:0", "Cos:0"), ("Cos:0", "Exp:0"))[i % 2]
        seen.setdefault(other, []).append(torch.zeros_like(z))
        y = see("Mul:0/1", see(taken, z.exp() if taken == "Exp:0" else z.cos()) * net.w)
    y.square().sum().backward()
    net.w.grad = None
    found = {
        name: torch.stack([t.detach() if t.grad is None else t.grad for t in tensors])
        for name, tensors in seen.items()
    }
    found["Tanh:0"] = found["Tanh:0"].view(TRIPS, 2, *x.shape)
    return found


def train(net, options):
    return poptorch.trainingModel(net, options, torch.optim.SGD(net.parameters(), lr=0.0))


NAMES = ("Sin:0", "Tanh:0", "Exp:0", "Cos:0", "Mul:0/1")


def test_names():
    device = train(Net(everything), make_options())
    device.compile(torch.randn(2, 3))
    names = device.getTensorNames()
    assert {f"Gradient___{name}" for name in NAMES} <= set(names)
    assert len(names) == len(set(names))
    inference = poptorch.inferenceModel(Net(everything), make_options())
    inference.compile(torch.randn(2, 3))
    assert not any("Gradient" in name for name in inference.getTensorNames())


@pytest.mark.parametrize("mode", [OutputMode.All, OutputMode.Final, OutputMode.Sum])
def test_anchors(mode):
    net, x = Net(everything), torch.randn(4, 3)
    parts = [eager_gradients(net, part) for part in x.chunk(2)]
    options = make_options(2)
    for name in NAMES:
        options.anchorTensor(name, f"Gradient___{name}", mode)
    device = train(net, options)
    device(x)
    for name in NAMES:
        both = [part[name] for part in parts]
        expected = {
            OutputMode.All: lambda both=both: torch.cat(both),
            OutputMode.Final: lambda both=both: both[-1],
            OutputMode.Sum: lambda both=both: both[0] + both[1],
        }[mode]()
        torch.testing.assert_close(device.getAnchoredTensor(name), expected, msg=name)


@pytest.mark.parametrize("mode", [OutputMode.All, OutputMode.Final, OutputMode.Sum])
def test_anchors_under_gradient_accumulation(mode):
    net, x = Net(everything), torch.randn(8, 3)
    names = [*(f"Gradient___{name}" for name in NAMES), "Sin:0", "Tanh:0"]
    options = make_options(2, 2)
    options.anchorTensor("all sin", "Sin:0", OutputMode.All)
    options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    for name in names:
        options.anchorTensor(name, name, mode)
    device = train(net, options)
    device(x)
    parts = [eager_gradients(net, part) for part in x.chunk(4)]
    for name in NAMES:
        gradients = [part[name] for part in parts]
        expected = {
            OutputMode.All: lambda found=gradients: torch.cat(found),
            OutputMode.Final: lambda found=gradients: found[-1],
            OutputMode.Sum: lambda found=gradients: sum(found),
        }[mode]()
        found = device.getAnchoredTensor(f"Gradient___{name}")
        torch.testing.assert_close(found, expected, msg=name)
    sines = device.getAnchoredTensor("all sin").chunk(4)
    expected = {
        "All": lambda: torch.cat(sines),
        "Final": lambda: sines[-1],
        "Sum": lambda: sum(sines),
    }
    torch.testing.assert_close(device.getAnchoredTensor("Sin:0"), expected[mode.name]())


def test_the_values_are_the_same_with_anchors():
    results = []
    for names in ([], NAMES):
        options = make_options()
        for name in names:
            options.anchorTensor(name, f"Gradient___{name}")
        net = Net(everything)
        device = poptorch.trainingModel(net, options, torch.optim.SGD(net.parameters(), lr=0.1))
        torch.manual_seed(1)
        results.append([device(torch.randn(2, 3)) for _ in range(2)])
        device.copyWeightsToHost()
        results[-1].append([net.w.detach()])
    for ours, others in zip(*results, strict=True):
        assert all(map(torch.equal, ours, others))


def test_a_body_that_changes_tensors_in_place():
    def loop(net, x):
        def body(y):
            z = y * 2
            z.mul_(net.w)
            return torch.sin(z)

        return for_loop(2, body, [x])[0]

    net, x = Net(loop), torch.randn(2, 3)
    options = make_options()
    options.anchorTensor("sin", "Gradient___Sin:0")
    device = train(net, options)
    device(x)
    y, seen = x * net.w, []
    for _ in range(2):
        y = torch.sin(y * 2 * net.w)
        y.retain_grad()
        seen.append(y)
    y.square().sum().backward()
    expected = torch.stack([one.grad for one in seen])
    torch.testing.assert_close(device.getAnchoredTensor("sin"), expected)


def test_gradients_that_the_body_computes_itself_have_no_name():
    def loop(net, x):
        def body(y):
            z = torch.sin(y)
            (g,) = torch.autograd.grad(z.sum(), [y], create_graph=True)
            return g * net.w

        return for_loop(2, body, [x])[0]

    device = train(Net(loop), make_options())
    device.compile(torch.randn(2, 3))
    names = [name for name in device.getTensorNames() if name.startswith("Gradient___")]
    assert len(names) == len(set(names))
    options = make_options()
    options.anchorTensor("it", "Gradient___Mul:0/2")
    anchored = train(Net(loop), options)
    x = torch.randn(2, 3)
    ys, _ = anchored(x)
    torch.testing.assert_close(anchored.getAnchoredTensor("it")[-1], 2 * ys)


# --- Hooks -----------------------------------------------------------------------------------


def hooked(act):
    """Return a loop whose body has a hook."""

    def loop(net, x):
        def body(y):
            y = torch.tanh(y)
            y.register_hook(act)
            return y * net.w

        return for_loop(TRIPS, body, [x])[0]

    return loop


def expected_in_hooks(net, x):
    y, seen = x * net.w, []
    for _ in range(TRIPS):
        y = torch.tanh(y)
        y.register_hook(seen.append)
        y = y * net.w
    y.square().sum().backward()
    net.w.grad = None
    return torch.stack(seen)


def test_a_hook_enqueues_from_the_last_iteration_to_the_first():
    queue = poptorch.OutfeedQueue()
    net = Net(hooked(lambda gradient: queue.enqueue({"g": gradient})))
    x = torch.randn(2, 3)
    device = train(net, make_options())
    device(x)
    torch.testing.assert_close(queue.dequeue()["g"], expected_in_hooks(net, x))


def test_a_hook_outside_of_bodies_enqueues():
    queue = poptorch.OutfeedQueue()

    def forward(net, x):
        y = torch.tanh(x)
        y.register_hook(lambda gradient: queue.enqueue(gradient))
        return y * net.w

    net, x = Net(forward), torch.randn(4, 3)
    device = train(net, make_options(2))
    device(x)
    y = torch.tanh(x * net.w)
    expected = (2 * (y * net.w) * net.w).view(2, 2, 3).detach()
    torch.testing.assert_close(queue.dequeue(), expected)


def test_hooks_of_both_sides_of_a_branch_and_of_an_inner_loop():
    taken, inner = poptorch.OutfeedQueue(), poptorch.OutfeedQueue()

    def loop(net, x):
        def side(y):
            y = torch.exp(y)
            y.register_hook(lambda gradient: taken.enqueue(gradient))
            return y

        def step(y):
            y = torch.tanh(y)
            y.register_hook(lambda gradient: inner.enqueue(gradient))
            return y

        def body(y, i):
            (y,) = for_loop(2, step, [y])
            return cond(i == 1, side, [y], torch.cos, [y])[0] * net.w, i + 1

        return for_loop(TRIPS, body, [x, torch.zeros((), dtype=torch.int32, device="cpu")])[0]

    net, x = Net(loop), torch.randn(2, 3)
    device = train(net, make_options())
    device(x)
    y, exps, tanhs = x * net.w, [], []
    for i in range(TRIPS):
        for _ in range(2):
            y = torch.tanh(y)
            y.register_hook(tanhs.append)
        y = y.exp() if i == 1 else y.cos()
        if i == 1:
            y.register_hook(exps.append)
        y = y * net.w
    y.square().sum().backward()
    torch.testing.assert_close(taken.dequeue(), torch.stack(exps))
    torch.testing.assert_close(inner.dequeue(), torch.stack(tanhs))


def test_values_and_gradients_of_one_body_go_to_queues_of_their_own():
    values, gradients = poptorch.OutfeedQueue(), poptorch.OutfeedQueue()

    def loop(net, x):
        def body(y):
            y = torch.tanh(y)
            values.enqueue(y)
            y.register_hook(lambda gradient: gradients.enqueue(gradient))
            return y * net.w

        return for_loop(TRIPS, body, [x])[0]

    net, x = Net(loop), torch.randn(2, 3)
    train(net, make_options())(x)
    y, seen = x * net.w, []
    for _ in range(TRIPS):
        seen.append(torch.tanh(y))
        y = seen[-1] * net.w
    torch.testing.assert_close(values.dequeue(), torch.stack(seen).detach())
    torch.testing.assert_close(gradients.dequeue(), expected_in_hooks(net, x))


def test_a_hook_prints(capfd):
    def quiet(gradient):
        poptorch.ipu_print_tensor(gradient, "it")

    x = torch.randn(2, 3)
    train(Net(hooked(quiet)), make_options())(x)
    assert capfd.readouterr().err == ""  # nobody uses what the print returns

    def loud(gradient):
        return poptorch.ipu_print_tensor(gradient, "it", print_gradient=False)

    train(Net(hooked(loud)), make_options())(x)
    assert capfd.readouterr().err.count("it: ") == TRIPS


def test_a_hook_that_changes_the_gradient_still_does():
    x, weights = torch.randn(2, 3), []
    for act in (lambda gradient: gradient * 2, lambda gradient: None):
        net = Net(hooked(act))
        device = poptorch.trainingModel(net, make_options(), torch.optim.SGD([net.w], lr=0.1))
        device(x)
        device.copyWeightsToHost()
        y = Net(None)
        z = x * y.w
        for _ in range(TRIPS):
            z = torch.tanh(z)
            z.register_hook(act)
            z = z * y.w
        z.square().sum().backward()
        torch.testing.assert_close(net.w.detach(), (y.w - 0.1 * y.w.grad).detach())
        weights.append(net.w.detach().clone())
    assert not torch.equal(*weights)


@pytest.mark.parametrize("mode", [OutputMode.All, OutputMode.Final, OutputMode.Sum])
def test_anchors_of_a_loop_in_the_body_of_a_device_loop(mode):
    net, x = Net(everything), torch.randn(4, 3)
    parts = [eager_gradients(net, part) for part in x.chunk(2)]
    options = poptorch.Options()
    for name in NAMES:
        options.anchorTensor(name, f"Gradient___net/{name}", mode)
    queue = poptorch.InfeedQueue(list(x.chunk(2)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)

    def body(part):
        optimizer.zero_grad()
        net(part)[1].backward()
        optimizer.step()

    @poptorch.function(options=options)
    def run():
        poptorch.repeat(2, body, infeed=queue)

    run()
    (program,) = run.programs
    for name in NAMES:
        both = [part[name] for part in parts]
        expected = {
            OutputMode.All: lambda both=both: torch.cat(both),
            OutputMode.Final: lambda both=both: both[-1],
            OutputMode.Sum: lambda both=both: both[0] + both[1],
        }[mode]()
        torch.testing.assert_close(program.getAnchoredTensor(name), expected, msg=name)
