"""Networks that take turns in one iteration, against the same text in eager PyTorch.

What is read after ``optimizer.step()`` is the new weight.
"""

import copy
import re
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import popsim_torch as poptorch
from tests.sweeps import combined, one_by_one, sampled

TRIPS = 12


class Players:
    """A generator, a discriminator, and their optimizers."""

    def __init__(self, generator, discriminator, optimizer):
        self.g, self.d = generator, discriminator
        self.of_g, self.of_d = optimizer(generator), optimizer(discriminator)

    def tensors(self):
        parts = {"g": self.g, "d": self.d}
        for part, module in parts.items():
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if tensor.is_floating_point():
                    yield f"{part}.{name}", tensor.detach()


def small():
    torch.manual_seed(3)
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
    return generator, nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


def convolutional():
    torch.manual_seed(3)
    generator = nn.Sequential(
        nn.ConvTranspose2d(8, 16, 4, 1, 0, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(True),
        nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False),
        nn.Tanh(),
    )
    discriminator = nn.Sequential(
        nn.Conv2d(3, 16, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(16, 32, 4, 1, 1, bias=False),
        nn.BatchNorm2d(32),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(32, 1, 3, 1, 0, bias=False),
        nn.Sigmoid(),
    )
    return generator, discriminator


def batches(shape=(8, 6), noise=(3, 8, 4)):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(shape, generator=generator), torch.randn(noise, generator=generator))
        for _ in range(TRIPS)
    ]


def adam(module, kind=torch.optim.Adam):
    return kind(module.parameters(), lr=2e-3, betas=(0.5, 0.999))


def sgd(module, kind=torch.optim.SGD):
    return kind(module.parameters(), lr=0.01)


def momentum(module, kind=torch.optim.SGD):
    return kind(module.parameters(), lr=0.01, momentum=0.9, weight_decay=0.01)


OPTIMIZERS = {
    "Adam": adam,
    "SGD": sgd,
    "momentum": momentum,
    "AdamW": lambda module: torch.optim.AdamW(module.parameters(), lr=2e-3),
    "RMSprop": lambda module: torch.optim.RMSprop(module.parameters(), lr=1e-3),
    "poptorch Adam": lambda module: adam(module, poptorch.optim.Adam),
    "poptorch SGD": lambda module: momentum(module, poptorch.optim.SGD),
    # (without decay: in this form a velocity contains that of the weights after the last update)
    "combined": lambda module: poptorch.optim.SGD(
        module.parameters(), lr=0.01, momentum=0.9, use_combined_accum=True
    ),
}
EAGER = {
    "poptorch Adam": adam,
    "poptorch SGD": momentum,
    "combined": lambda module: torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9),
}


def train_on_device(players, step, data, calls=1, between=lambda players: None, **options):
    """Return what each iteration returned, stacked, and the function."""
    infeed, outfeed = poptorch.InfeedQueue(data), poptorch.OutfeedQueue()

    @poptorch.function(**options)
    def train():
        def body(real, noise):
            outfeed.enqueue(step(players, real, noise))

        poptorch.repeat(len(data) // calls, body, infeed=infeed)

    try:
        for _ in range(calls):
            train()
            between(players)
    finally:
        infeed.deleter()
    return outfeed.dequeue(), train


def train_in_eager(players, step, data, calls=1, between=lambda players: None):
    seen = []
    for iteration, element in enumerate(data, 1):
        seen.append([value.detach().clone() for value in step(players, *element)])
        if iteration % (len(data) // calls) == 0:
            between(players)
    return [torch.stack(values) for values in zip(*seen, strict=True)]


def assert_trains_like_eager(step, name="Adam", networks=small, data=None, **arguments):
    """Train both ways; compare what each iteration returned, and all weights and buffers."""
    ours = networks()
    theirs = Players(*copy.deepcopy(ours), EAGER.get(name, OPTIMIZERS[name]))
    ours = Players(*ours, OPTIMIZERS[name])
    data = batches() if data is None else data
    seen, function = train_on_device(ours, step, data, **arguments)
    arguments.pop("options", None)
    expected = train_in_eager(theirs, step, data, **arguments)
    for values, reference in zip(seen, expected, strict=True):
        torch.testing.assert_close(values, reference, rtol=1e-4, atol=1e-5)
    for (name, value), (_, reference) in zip(ours.tensors(), theirs.tensors(), strict=True):
        torch.testing.assert_close(
            value, reference, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )
    return function


def dcgan(players, real, noise):
    """As the tutorial that everybody starts from has it."""
    net_g, net_d, criterion = players.g, players.d, nn.BCELoss()
    # (1) Update D: maximize log(D(x)) + log(1 - D(G(z)))
    net_d.zero_grad()
    label = torch.full((real.size(0),), 1.0, dtype=torch.float, device=real.device)
    output = net_d(real).view(-1)
    err_d_real = criterion(output, label)
    err_d_real.backward()
    d_x = output.mean()
    fake = net_g(noise)
    label.fill_(0.0)
    output = net_d(fake.detach()).view(-1)
    err_d_fake = criterion(output, label)
    err_d_fake.backward()
    d_g_z1 = output.mean()
    err_d = err_d_real + err_d_fake
    players.of_d.step()
    # (2) Update G: maximize log(D(G(z)))
    net_g.zero_grad()
    label.fill_(1.0)
    output = net_d(fake).view(-1)
    err_g = criterion(output, label)
    err_g.backward()
    d_g_z2 = output.mean()
    players.of_g.step()
    return err_d, err_g, d_x, d_g_z1, d_g_z2


# `test_several_steps_of_one_optimizer_in_an_iteration` has all optimizers in each run.
@pytest.mark.parametrize("name", sampled(OPTIMIZERS, ["Adam", "RMSprop", "poptorch SGD"]))
def test_dcgan(name):
    data = batches((4, 3, 8, 8), (4, 8, 1, 1))
    assert_trains_like_eager(dcgan, name, convolutional, data)


@torch.no_grad()
def clipped(module):
    for parameter in module.parameters():
        parameter.clamp_(-0.1, 0.1)


def clipped_data(module):
    for parameter in module.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def wasserstein(clip, num_critic=3):
    def step(players, real, noise):
        for turn in range(num_critic):
            players.of_d.zero_grad()
            fake = players.g(noise[turn]).detach()
            loss_d = players.d(fake).mean() - players.d(real).mean()
            loss_d.backward()
            players.of_d.step()
            clip(players.d)
        players.of_g.zero_grad()
        loss_g = -players.d(players.g(noise[0])).mean()
        loss_g.backward()
        players.of_g.step()
        return loss_d, loss_g, players.d[0].weight.abs().max()

    return step


@pytest.mark.parametrize(
    ("name", "clip"),
    combined(
        OPTIMIZERS,
        [clipped, clipped_data],
        quick=lambda name, clip: (
            name in (("Adam", "momentum", "combined") if clip is clipped else ("Adam",))
        ),
    ),
)
def test_wasserstein_gan_with_clipped_weights(name, clip):
    assert_trains_like_eager(wasserstein(clip), name)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_several_steps_of_one_optimizer_in_an_iteration(name):
    assert_trains_like_eager(wasserstein(lambda module: None), name)


def gradient_penalty(players, real, noise):
    for turn in range(2):
        players.of_d.zero_grad(set_to_none=False)
        fake = players.g(noise[turn]).detach()
        mixed = (0.3 * real + 0.7 * fake).requires_grad_(True)
        (slope,) = torch.autograd.grad(players.d(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(2, dim=1) - 1).square().mean()
        loss_d = players.d(fake).mean() - players.d(real).mean() + 10 * penalty
        loss_d.backward()
        players.of_d.step()
    players.of_g.zero_grad(set_to_none=False)
    loss_g = -players.d(players.g(noise[2])).mean()
    loss_g.backward()
    players.of_g.step()
    return loss_d, penalty, loss_g


def frozen_in_turn(players, real, noise):
    for parameter in players.d.parameters():
        parameter.requires_grad = True
    players.of_d.zero_grad()
    loss_d = players.d(players.g(noise[0]).detach()).mean() - players.d(real).mean()
    loss_d.backward()
    players.of_d.step()
    players.d.requires_grad_(False)
    players.of_g.zero_grad()
    loss_g = -players.d(players.g(noise[1])).mean()
    loss_g.backward()
    players.of_g.step()
    return loss_d, loss_g


def the_same_gradient_twice(players, real, noise):
    players.of_d.zero_grad()
    loss = players.d(real).square().mean()
    loss.backward()
    players.of_d.step()
    players.of_d.step()
    return (loss,)


def steps_of_different_parameters(players, real, noise):
    players.of_d.zero_grad()
    players.d[0](real).square().mean().backward()
    players.of_d.step()
    players.of_d.zero_grad()
    loss = players.d(real).square().mean()
    loss.backward()
    players.of_d.step()
    return (loss,)


def what_weights_were(players, real, noise):
    """Copies from before the step, and views that follow the weight."""
    weight = players.d[0].weight
    before, turned = weight.clone(), weight.detach().t().clone()
    view = weight.detach()[1:]
    players.of_d.zero_grad()
    loss = players.d(real).square().mean()
    loss.backward()
    players.of_d.step()
    return loss, weight - before, (weight.t() - turned).sum(), view * 2


def undone(players, real, noise):
    """A step whose weights are put back."""
    before = [parameter.detach().clone() for parameter in players.d.parameters()]
    players.of_d.zero_grad()
    loss = players.d(real).square().mean()
    loss.backward()
    players.of_d.step()
    ahead = players.d(real).square().mean()
    with torch.no_grad():
        for parameter, old in zip(players.d.parameters(), before, strict=True):
            parameter.copy_(old)
            parameter.add_(0.01)
    return loss, ahead


def averaged(players, real, noise):
    """Weights that follow others slowly."""
    players.of_d.zero_grad()
    loss = players.d(real).square().mean()
    loss.backward()
    players.of_d.step()
    with torch.no_grad():
        players.g[0].bias.lerp_(players.d[0].bias, 0.1)
        players.g[0].weight.mul_(0.9).add_(players.d[0].weight[:, :4], alpha=0.1)
    return loss, players.g(noise[0])


def changed_gradients(players, real, noise):
    """A gradient that changes in place after its step."""
    players.of_d.zero_grad()
    loss = players.d(real).square().mean()
    loss.backward()
    players.of_d.step()
    for parameter in players.d.parameters():
        parameter.grad.mul_(0.5)
    return loss, players.d[0].bias.grad


def gradients_put_there(players, real, noise):
    loss = players.d(real).square().mean()
    found = torch.autograd.grad(loss, list(players.d.parameters()))
    for parameter, gradient in zip(players.d.parameters(), found, strict=True):
        parameter.grad = gradient
    players.of_d.step()
    return loss, players.d(real).square().mean()


def clipped_between_steps(players, real, noise):
    players.of_d.zero_grad()
    players.d(real).square().mean().backward()
    players.of_d.step()
    clipped(players.d)
    players.of_d.zero_grad()
    loss = players.d(real).square().mean()
    loss.backward()
    players.of_d.step()
    return (loss,)


def clipped_in_front(players, real, noise):
    clipped(players.d)
    players.of_d.zero_grad()
    loss = players.d(real).square().mean()
    loss.backward()
    players.of_d.step()
    return loss, players.d(real).mean()


def a_loop_behind_a_step(players, real, noise):
    players.of_d.zero_grad()
    loss = players.d(real).square().mean()
    loss.backward()
    players.of_d.step()
    bias, y = players.d[0].bias, loss.detach()
    if y.is_cpu:
        for _ in range(3):
            y = y * 0.5 + bias.sum()
    else:
        (y,) = poptorch.for_loop(3, lambda y: y * 0.5 + bias.sum(), [y])
    return loss, y


def rebuilt(players, real, noise):
    """What is computed once more in the backward pass reads the weights that it read first."""
    players.of_d.zero_grad()
    players.of_g.zero_grad()
    fake = checkpoint(players.g, noise[0], use_reentrant=False)
    real_loss = checkpoint(players.d, real, use_reentrant=False).square().mean()
    loss_d = real_loss - players.d(fake.detach()).mean()
    loss_d.backward()
    players.of_d.step()
    loss_g = -checkpoint(players.d, fake, use_reentrant=False).mean()
    loss_g.backward()
    players.of_g.step()
    return loss_d, loss_g


def clipped_gradients(players, real, noise):
    players.of_d.zero_grad()
    players.d(real).square().mean().backward()
    nn.utils.clip_grad_norm_(players.d.parameters(), 0.05)
    players.of_d.step()
    players.of_d.zero_grad()
    loss = players.d(real).square().mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(players.d.parameters(), 0.05)
    players.of_d.step()
    return loss, norm


BODIES = [
    gradient_penalty,
    frozen_in_turn,
    the_same_gradient_twice,
    steps_of_different_parameters,
    what_weights_were,
    undone,
    averaged,
    changed_gradients,
    gradients_put_there,
    clipped_between_steps,
    clipped_in_front,
    a_loop_behind_a_step,
    rebuilt,
    clipped_gradients,
]


@pytest.mark.parametrize(("name", "body"), one_by_one(["momentum", "Adam"], BODIES))
def test_what_is_read_behind_a_step_is_new(body, name):
    assert_trains_like_eager(body, name)


def looked_at(players, real, noise):
    """Steps at the end of the iteration, and a look at what they made of a weight."""
    loss = at_the_end(players, real, noise)
    return *loss, players.d[2].bias, players.g[2].bias


def at_the_end(players, real, noise):
    players.of_d.zero_grad()
    players.of_g.zero_grad()
    loss_d = players.d(real).square().mean()
    loss_g = players.d(players.g(noise[0])).mean()
    loss_d.backward()
    loss_g.backward()
    players.of_d.step()
    players.of_g.step()
    return loss_d, loss_g


def updates(text):
    """Return phase, kind and number of weights of each update in the text of a program."""
    found = []
    for line in text.splitlines():
        match = re.match(r"(backward|update) 0: .* = (\w+_update)\(", line)
        if match:
            count = re.search(r"parameters=(\d+)", line)
            found.append((*match.groups(), 1 if count is None else int(count[1])))
    return found


@pytest.mark.parametrize("name", sampled(OPTIMIZERS, ["Adam", "SGD", "poptorch SGD", "combined"]))
def test_looking_at_weights_changes_no_bit(name):
    found = []
    for body in (at_the_end, looked_at):
        players = Players(*small(), OPTIMIZERS[name])
        seen, _ = train_on_device(players, body, batches())
        found.append([*seen[:2], *(value for _, value in players.tensors())])
    for plain, looked in zip(*found, strict=True):
        assert torch.equal(plain, looked)


def test_steps_that_nobody_looks_at_are_taken_together_at_the_end():
    function = assert_trains_like_eager(at_the_end)
    (program,) = function.programs
    assert updates(str(program.program())) == 8 * [("update", "adam_update", 1)]
    assert updates(str(program.program(host=True))) == [("update", "adam_update", 8)]


def test_the_last_step_of_an_iteration_is_taken_at_its_end():
    data = batches((4, 3, 8, 8), (4, 8, 1, 1))
    function = assert_trains_like_eager(dcgan, "Adam", convolutional, data)
    (program,) = function.programs
    # First the discriminator, which the generator's loss goes through; then the generator.
    assert updates(str(program.program(host=True))) == [
        ("backward", "adam_update", 5),
        ("update", "adam_update", 4),
    ]


def test_learning_rates_change_between_calls():
    def between(players):
        for optimizer in (players.of_d, players.of_g):
            optimizer.param_groups[0]["lr"] *= 0.5

    assert_trains_like_eager(wasserstein(clipped), "momentum", calls=3, between=between)


def test_weights_of_the_host_count_from_the_next_call_on():
    @torch.no_grad()
    def between(players):
        players.d[0].weight.mul_(0.5)
        players.g[0].bias.add_(0.1)

    assert_trains_like_eager(wasserstein(clipped), "Adam", calls=3, between=between)


@pytest.mark.parametrize("mode", [1, 4])
def test_recomputation_keeps_what_old_weights_made(mode):
    options = poptorch.Options()
    options._Popart.set("autoRecomputation", mode)
    data = batches((4, 3, 8, 8), (4, 8, 1, 1))
    assert_trains_like_eager(dcgan, "Adam", convolutional, data, options=options)


UNROLLED = {
    **{name: OPTIMIZERS[name] for name in ("Adam", "momentum", "combined")},
    "LAMB": lambda module: poptorch.optim.LAMB(module.parameters(), lr=0.01),
    "clipped": lambda module: poptorch.optim.AdamW(module.parameters(), lr=0.01, max_grad_norm=0.1),
}


@pytest.mark.parametrize("name", UNROLLED)
def test_steps_of_one_iteration_have_the_bits_of_iterations_of_one_step(name):
    found = []
    for steps in (1, 3):
        net = small()[1]
        optimizer, x = UNROLLED[name](net), batches()[0][0]
        losses = poptorch.OutfeedQueue()

        def body(net=net, optimizer=optimizer, losses=losses, x=x, steps=steps):
            for _ in range(steps):
                optimizer.zero_grad()
                loss = net(x).square().mean()
                loss.backward()
                optimizer.step()
            losses.enqueue(loss)

        @poptorch.function
        def train(body=body, steps=steps):
            poptorch.repeat(TRIPS // steps, lambda: body())

        train()
        found.append([losses.dequeue()[-1], *net.state_dict().values()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_while_loop_takes_turns():
    ours = Players(*small(), momentum)
    theirs = Players(*copy.deepcopy((ours.g, ours.d)), momentum)
    real, noise = batches()[0]

    def body(iteration):
        wasserstein(clipped)(ours, real, noise)
        return iteration + 1

    @poptorch.function
    def train():
        return poptorch.while_loop(lambda iteration: iteration < 7.0, body, torch.tensor(0.0))

    assert train().item() == 7
    for _ in range(7):
        wasserstein(clipped)(theirs, real, noise)
    for (name, value), (_, reference) in zip(ours.tensors(), theirs.tensors(), strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-4, atol=1e-5, msg=name)


def test_half_precision():
    def halves():
        return [network.half() for network in small()]

    def step(players, real, noise):
        return wasserstein(clipped)(players, real.half(), noise.half())

    name = "SGD"
    ours = Players(*halves(), OPTIMIZERS[name])
    theirs = Players(*copy.deepcopy((ours.g, ours.d)), OPTIMIZERS[name])
    train_on_device(ours, step, batches())
    train_in_eager(theirs, step, batches())
    for (name, value), (_, reference) in zip(ours.tensors(), theirs.tensors(), strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-2, atol=2e-3, msg=name)


def test_gradients_of_a_step_in_the_middle_go_into_queues():
    players = Players(*small(), momentum)
    queue = poptorch.MaybeOutfeedQueue(filters=None)
    inner = players.of_d
    players.of_d = poptorch.OutfeedOptimizer(inner, queue, model=players.d)
    looks = poptorch.OutfeedQueue()

    def step(players, real, noise):
        players.of_d.zero_grad()
        loss = players.d(real).square().mean()
        loss.backward()
        gradient = players.d[2].bias.grad
        players.of_d.step()
        looks.enqueue(gradient)
        return (players.d(real).mean(),)

    train_on_device(players, step, batches())
    assert torch.equal(queue.dequeue()["2.bias_grad"], looks.dequeue())


def test_anchors_of_steps_in_the_middle():
    options, looks = poptorch.Options(), poptorch.OutfeedQueue()
    names = {"weight": "UpdatedVar___d.2.bias", "gradient": "Gradient___d.2.bias/2"}
    for short, name in names.items():
        options.anchorTensor(short, name, poptorch.OutputMode.All)
    players = Players(*small(), momentum)
    turns = wasserstein(lambda module: None)

    def step(players, real, noise):
        seen = turns(players, real, noise)
        looks.enqueue({"weight": players.d[2].bias})
        return seen

    _, function = train_on_device(players, step, batches(), options=options)
    (program,) = function.programs
    weights = program.getAnchoredTensor("weight").reshape(TRIPS, 1)
    assert torch.equal(weights, looks.dequeue()["weight"])
    assert program.getAnchoredTensor("gradient").shape == (TRIPS,)


class Labelled:
    """A classifier that the generator's loss goes through, with labels that may be out of range."""

    def __init__(self):
        torch.manual_seed(3)
        self.g = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.d = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 5))
        self.of_g = torch.optim.Adam(self.g.parameters(), lr=0.01)
        self.of_d = torch.optim.SGD(self.d.parameters(), lr=0.1, momentum=0.9)

    def iteration(self, x, noise, labels):
        self.of_d.zero_grad()
        nn.functional.cross_entropy(self.d(x), labels[0]).backward()
        self.of_d.step()
        self.of_g.zero_grad()
        loss = nn.functional.cross_entropy(self.d(self.g(noise)), labels[1])
        loss.backward()
        self.of_g.step()

    def state(self):
        found = [*self.g.state_dict().values(), *self.d.state_dict().values()]
        for optimizer in (self.of_g, self.of_d):
            for one in optimizer.state_dict()["state"].values():
                found += [one[kind] for kind in sorted(one) if one[kind] is not None]
        return [value for value in found if value.is_floating_point()]


def test_an_iteration_that_fails_behind_a_step_leaves_nothing_changed():
    generator = torch.Generator().manual_seed(0)
    data = [
        (
            torch.randn(8, 6, generator=generator),
            torch.randn(8, 4, generator=generator),
            torch.randint(5, (2, 8), generator=generator),
        )
        for _ in range(TRIPS)
    ]
    data[7][2][1, 3] = 99
    ours, theirs = Labelled(), Labelled()
    infeed = poptorch.InfeedQueue(data)

    @poptorch.function
    def train(iterations):
        poptorch.repeat(iterations, ours.iteration, infeed=infeed)

    try:
        with pytest.raises(poptorch.Error, match="in iteration 7 of the loop"):
            train(TRIPS)
        for element in data[:7]:
            theirs.iteration(*element)
        for value, reference in zip(ours.state(), theirs.state(), strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-4, atol=1e-5)
    finally:
        infeed.deleter()


def test_a_loop_that_is_stopped_has_finished_both_steps():
    players = Players(*small(), adam)
    real, noise = batches()[0]
    queue = poptorch.OutfeedQueue(poptorch.OutfeedMode.LAST)

    @poptorch.function
    def train():
        def body():
            queue.enqueue(torch.stack(wasserstein(clipped)(players, real, noise)))

        poptorch.repeat(10**9, body)

    def stop():
        for _ in range(600):
            time.sleep(0.1)
            if train.programs and train.programs[0].num_iterations > 20:
                break
        train.stop()

    for _ in range(3):
        stopper = threading.Thread(target=stop)
        stopper.start()
        with pytest.raises(poptorch.Error, match="stopped"):
            train()
        stopper.join()
        steps = [
            {float(one["step"]) for one in optimizer.state_dict()["state"].values()}
            for optimizer in (players.of_d, players.of_g)
        ]
        ((of_d,), (of_g,)) = steps
        assert of_d == 3 * of_g > 0
