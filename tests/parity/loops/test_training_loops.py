"""Loops that train, against the same steps in eager PyTorch."""

import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch

LOSS = nn.CrossEntropyLoss()


def batches(count=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(count)
    ]


def network(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def assert_same_weights(model, eager, tolerance=1e-5):
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(
            ours.detach(),
            theirs.detach(),
            rtol=1e-4,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )


OPTIMIZERS = {
    "torch SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "torch Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "torch AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "poptorch SGD": lambda p: poptorch.optim.SGD(p, lr=0.1),
    "poptorch Adam": lambda p: poptorch.optim.Adam(p, lr=0.01),
}
EAGER = {
    "poptorch SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "poptorch Adam": OPTIMIZERS["torch Adam"],
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loop_trains_like_eager(name):
    model, data = network(), batches()
    eager = copy.deepcopy(model)
    optimizer = OPTIMIZERS[name](model.parameters())
    infeed = poptorch.InfeedQueue(data)
    outfeed = poptorch.OutfeedQueue()

    @poptorch.function
    def train():
        def step(x, y):
            loss = LOSS(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            outfeed.enqueue({"loss": loss, "gradient": model[0].weight.grad})

        poptorch.repeat(len(data), step, infeed=infeed)

    train()
    seen = outfeed.dequeue()
    reference = EAGER.get(name, OPTIMIZERS[name])(eager.parameters())
    losses, gradients = [], []
    for x, y in data:
        loss = LOSS(eager(x), y)
        reference.zero_grad()
        loss.backward()
        reference.step()
        losses.append(loss.detach())
        gradients.append(eager[0].weight.grad.clone())
    torch.testing.assert_close(seen["loss"], torch.stack(losses), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen["gradient"], torch.stack(gradients), rtol=1e-4, atol=1e-5)
    assert_same_weights(model, eager)
    infeed.deleter()


@pytest.mark.parametrize("mean", [True, False])
def test_gradients_of_several_iterations_update_once(mean):
    model, data = network(), batches()
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = poptorch.Options()
    kind = poptorch.ReductionType.Mean if mean else poptorch.ReductionType.Sum
    options.Training.accumulationAndReplicationReductionType(kind)
    infeed = poptorch.InfeedQueue(data)

    @poptorch.function(options=options)
    def train():
        def step(x, y):
            optimizer.zero_grad()
            LOSS(model(x), y).backward()
            optimizer.step()

        poptorch.repeat(len(data), step, infeed=infeed, gradient_accumulation=4)

    train()
    reference = torch.optim.SGD(eager.parameters(), lr=0.1)
    for group in _fours(data):
        reference.zero_grad()
        for x, y in group:
            (LOSS(eager(x), y) / (4 if mean else 1)).backward()
        reference.step()
    assert_same_weights(model, eager)
    infeed.deleter()


def _fours(data):
    return [data[i : i + 4] for i in range(0, len(data), 4)]


def test_two_optimizers_train_their_parts():
    first, second, (x, _) = nn.Linear(6, 4), nn.Linear(4, 1), batches(1)[0]
    eager = copy.deepcopy((first, second))

    def optimizers(one, other):
        return (
            torch.optim.SGD(one.parameters(), lr=0.1),
            torch.optim.Adam(other.parameters(), lr=0.05),
        )

    def step(models, steps):
        loss = models[1](models[0](x)).pow(2).mean()
        for optimizer in steps:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in steps:
            optimizer.step()
        return loss

    ours = optimizers(first, second)

    @poptorch.function
    def train():
        return poptorch.repeat(6, lambda _: step((first, second), ours), 0.0)

    last = train()
    reference = optimizers(*eager)
    for _ in range(6):
        expected = step(eager, reference)
    torch.testing.assert_close(last, expected.detach())
    assert_same_weights(first, eager[0])
    assert_same_weights(second, eager[1])


def test_gradients_are_clipped_in_the_body():
    model, (x, y) = network(), batches(1)[0]
    eager = copy.deepcopy(model)

    def step(net, optimizer):
        optimizer.zero_grad()
        LOSS(net(x), y).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    @poptorch.function
    def train():
        poptorch.repeat(5, lambda: step(model, optimizer))

    train()
    reference = torch.optim.SGD(eager.parameters(), lr=1.0)
    for _ in range(5):
        step(eager, reference)
    assert_same_weights(model, eager)


def test_gradients_without_an_optimizer_are_values():
    model, (x, y) = network(), batches(1)[0]
    eager = copy.deepcopy(model)

    @poptorch.function
    def run():
        def body(total):
            model.zero_grad()
            LOSS(model(x), y).backward()
            return total + model[2].bias.grad

        return poptorch.repeat(3, body, torch.zeros(3))

    LOSS(eager(x), y).backward()
    torch.testing.assert_close(run(), 3 * eager[2].bias.grad)
    assert model[2].bias.grad is None


def test_a_changed_learning_rate_counts_from_the_next_call_on():
    model, (x, y) = network(), batches(1)[0]
    eager = copy.deepcopy(model)

    def step(net, optimizer):
        optimizer.zero_grad()
        LOSS(net(x), y).backward()
        optimizer.step()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    reference = torch.optim.SGD(eager.parameters(), lr=0.5)
    schedules = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (optimizer, reference)]

    @poptorch.function
    def train():
        poptorch.repeat(2, lambda: step(model, optimizer))

    for _ in range(3):
        train()
        for _ in range(2):
            step(eager, reference)
        for schedule in schedules:
            schedule.step()
    assert_same_weights(model, eager)


def test_weights_go_between_functions_models_and_the_host():
    model, data = network(), batches()
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = data[0]

    @poptorch.function
    def train():
        def step():
            optimizer.zero_grad()
            LOSS(model(x), y).backward()
            optimizer.step()

        poptorch.repeat(3, step)

    @poptorch.function
    def predict(x):
        return poptorch.repeat(1, lambda _: model(x), torch.zeros(8, 3))

    inference = poptorch.inferenceModel(model)
    reference = torch.optim.SGD(eager.parameters(), lr=0.1)
    for round_ in range(3):
        train()
        for _ in range(3):
            reference.zero_grad()
            LOSS(eager(x), y).backward()
            reference.step()
        expected = eager(x).detach()
        torch.testing.assert_close(predict(x), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(inference(x), expected, rtol=1e-4, atol=1e-5)
        if round_ == 1:  # the host's own changes count, too
            with torch.no_grad():
                for parameter in (*model.parameters(), *eager.parameters()):
                    parameter.mul_(0.5)
        if round_ == 0:  # also those that change no tensor in place
            for parameter in (*model.parameters(), *eager.parameters()):
                parameter.data = parameter.data * 0.9
    assert_same_weights(model, eager)


def test_running_statistics_come_back():
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    eager, data = copy.deepcopy(model), batches(5)
    infeed = poptorch.InfeedQueue([x for x, _ in data])

    @poptorch.function
    def run():
        return poptorch.repeat(5, lambda _, x: model(x).sum(), 0.0, infeed)

    run()
    for x, _ in data:
        eager(x)
    torch.testing.assert_close(model[1].running_mean, eager[1].running_mean)
    torch.testing.assert_close(model[1].running_var, eager[1].running_var)
    infeed.deleter()


def test_anchors_show_what_a_loop_computes():
    model, (x, y) = network(), batches(1)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = poptorch.Options()
    options.anchorTensor("g", "Gradient___model.2.bias", output_mode=poptorch.OutputMode.All)

    @poptorch.function(options=options)
    def train():
        def step():
            optimizer.zero_grad()
            LOSS(model(x), y).backward()
            optimizer.step()

        poptorch.repeat(4, step)

    train()
    (program,) = train.programs
    assert program.getAnchoredTensor("g").shape == (12,)
    assert "UpdatedVar___model.0.weight" in program.getTensorNames()


def test_a_model_that_no_name_leads_to_is_found():
    class Registry:
        pass

    registry = Registry()
    registry.__class__.net = property(lambda self: nets[0])
    nets = [network()]
    x, y = batches(1)[0]
    optimizer = torch.optim.SGD(nets[0].parameters(), lr=0.1)
    before = nets[0][0].weight.detach().clone()

    @poptorch.function
    def train():
        def step():
            optimizer.zero_grad()
            LOSS(registry.net(x), y).backward()
            optimizer.step()

        poptorch.repeat(2, step)

    train()
    assert not torch.equal(nets[0][0].weight, before)


def test_stages_of_a_loop_run_as_a_pipeline():
    model, data = network(), batches(16)
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    infeed = poptorch.InfeedQueue(data, prefetch_depth=1)
    outfeed = poptorch.OutfeedQueue()

    @poptorch.function
    def train():
        def step(x, y):
            with poptorch.Block(ipu_id=0):
                hidden = model[1](model[0](x))
            with poptorch.Block(ipu_id=1):
                loss = LOSS(model[2](hidden), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                outfeed.enqueue(loss)

        poptorch.repeat(16, step, infeed=infeed, gradient_accumulation=4)

    train()
    reference = torch.optim.SGD(eager.parameters(), lr=0.1)
    losses = []
    for group in _fours(data):
        reference.zero_grad()
        for x, y in group:
            loss = LOSS(eager(x), y)
            losses.append(loss.detach())
            (loss / 4).backward()
        reference.step()
    torch.testing.assert_close(outfeed.dequeue(), torch.stack(losses), rtol=1e-4, atol=1e-5)
    assert_same_weights(model, eager)
    infeed.deleter()


def set_gradients_to_none(model, _optimizer):
    for parameter in model.parameters():
        parameter.grad = None


@pytest.mark.parametrize("after", [False, True], ids=["in front", "after"])
@pytest.mark.parametrize(
    "clear",
    [
        lambda model, optimizer: optimizer.zero_grad(),
        lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
        lambda model, optimizer: model.zero_grad(),
        lambda model, optimizer: model.zero_grad(set_to_none=False),
        lambda model, optimizer: [part.zero_grad() for part in model],
        set_gradients_to_none,
    ],
    ids=["optimizer", "optimizer, zeros", "model", "model, zeros", "parts", "none"],
)
def test_all_ways_to_take_gradients_away(clear, after):
    model, data = network(), batches(6)
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = torch.optim.SGD(eager.parameters(), lr=0.1)
    infeed = poptorch.InfeedQueue(data)

    def step(model, optimizer, x, y):
        if not after:
            clear(model, optimizer)
        LOSS(model(x), y).backward()
        optimizer.step()
        if after:
            clear(model, optimizer)

    @poptorch.function
    def train():
        poptorch.repeat(len(data), lambda x, y: step(model, optimizer, x, y), infeed=infeed)

    train()
    for x, y in data:
        step(eager, reference, x, y)
    assert_same_weights(model, eager)
    assert not any("zero_grad" in vars(part) for part in model.modules())
    infeed.deleter()
