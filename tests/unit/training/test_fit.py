"""fit trains as eager PyTorch does, and returns the numbers of every step."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import popsim_torch as poptorch

BATCH, STEPS = 8, 12


@pytest.fixture
def samples():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(BATCH * STEPS, 6, generator=generator)
    return x, torch.randint(0, 4, (len(x),), generator=generator)


@pytest.fixture
def loader(samples):
    return DataLoader(TensorDataset(*samples), batch_size=BATCH)


def make_model(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).to(dtype)


class WithLoss(nn.Module):
    """A model that returns its loss in some form."""

    def __init__(self, form=lambda output, loss: (output, loss)):
        super().__init__()
        self.body = make_model()
        self.form = form

    def forward(self, x, labels):
        output = self.body(x)
        return self.form(output, nn.functional.cross_entropy(output, labels))


def eager_losses(model, batches, optimizer, accumulation=1):
    losses = []
    for position, (x, y) in enumerate(batches):
        if position % accumulation == 0:
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        (loss / accumulation).backward()
        if position % accumulation == accumulation - 1:
            optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


class Kept:
    """A callback that keeps everything that it gets."""

    def __init__(self):
        self.begun, self.logs, self.steps = [], [], []

    def on_epoch_begin(self, epoch):
        self.begun.append(epoch)

    def on_epoch_end(self, epoch, logs):
        assert epoch == self.begun[-1]
        self.logs.append(logs)


class EachStep(Kept):
    def on_batch_end(self, step, logs):
        self.steps.append((step, logs))


OPTIMIZERS = {
    "torch SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "poptorch SGD": lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("per_execution", [None, 3])
def test_losses_and_weights_are_those_of_eager_pytorch(loader, kind, per_execution):
    model, kept = make_model(), Kept()
    eager = copy.deepcopy(model)
    history = poptorch.fit(
        model,
        loader,
        epochs=2,
        steps_per_execution=per_execution,
        callbacks=kept,
        loss=nn.CrossEntropyLoss(),
        optimizer=OPTIMIZERS[kind](model.parameters()),
        verbose=0,
    )
    batches = [*loader, *loader]
    kind = kind.replace("poptorch", "torch")
    expected = eager_losses(eager, batches, OPTIMIZERS[kind](eager.parameters()))
    losses = torch.cat([logs["loss"] for logs in kept.logs])
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    assert history["loss"] == pytest.approx(expected.view(2, -1).mean(1).tolist(), rel=1e-4)
    assert kept.begun == [0, 1]


def test_float16(loader):
    model, kept = make_model(torch.float16), Kept()
    eager = copy.deepcopy(model)
    batches = [(x.half(), y) for x, y in loader]
    poptorch.fit(
        model,
        batches,
        callbacks=[kept],
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        verbose=0,
    )
    expected = eager_losses(eager, batches, torch.optim.SGD(eager.parameters(), lr=0.1))
    torch.testing.assert_close(kept.logs[0]["loss"], expected, rtol=1e-2, atol=1e-2)


def test_gradient_accumulation_of_the_options(loader):
    model, kept = make_model(), Kept()
    eager = copy.deepcopy(model)
    options = poptorch.Options()
    options.Training.gradientAccumulation(3)
    poptorch.fit(
        model,
        loader,
        steps_per_execution=6,
        callbacks=[kept],
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.2),
        options=options,
        verbose=0,
    )
    expected = eager_losses(eager, loader, torch.optim.SGD(eager.parameters(), lr=0.2), 3)
    torch.testing.assert_close(kept.logs[0]["loss"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "form",
    [
        lambda output, loss: loss,
        lambda output, loss: (output, loss),
        lambda output, loss: [loss, output],
        lambda output, loss: {"logits": output, "loss": loss},
    ],
)
def test_a_model_may_return_its_loss(loader, form):
    model, kept = WithLoss(form), Kept()
    eager = copy.deepcopy(model.body)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    poptorch.fit(model, loader, callbacks=[kept], optimizer=optimizer, verbose=0)
    expected = eager_losses(eager, loader, torch.optim.SGD(eager.parameters(), lr=0.1))
    torch.testing.assert_close(kept.logs[0]["loss"], expected, rtol=1e-4, atol=1e-5)


def test_batches_may_be_dictionaries(loader):
    model, kept = WithLoss(), Kept()
    eager = copy.deepcopy(model.body)
    poptorch.fit(
        model,
        [{"labels": y, "x": x} for x, y in loader],
        callbacks=[kept],
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        verbose=0,
    )
    expected = eager_losses(eager, loader, torch.optim.SGD(eager.parameters(), lr=0.1))
    torch.testing.assert_close(kept.logs[0]["loss"], expected, rtol=1e-4, atol=1e-5)


class Batched(Dataset):
    """A dataset whose items are batches, and that never ends by itself."""

    def __init__(self, batches):
        self.batches = list(batches)

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index % len(self.batches)]


class Endless(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        while True:
            yield from zip(*self.samples, strict=True)


@pytest.mark.parametrize("kind", ["dataset", "list", "generator", "endless", "poptorch loader"])
def test_data_of_many_kinds(loader, samples, kind):
    model, kept = make_model(), Kept()
    eager, options = copy.deepcopy(model), poptorch.Options()
    steps, per_execution = STEPS, None
    if kind == "dataset":
        data, steps = Batched(loader), None
    elif kind == "list":
        data, steps = list(loader), None
    elif kind == "generator":
        data = (batch for batch in [*loader, *loader])
    elif kind == "endless":
        data = DataLoader(Endless(samples), batch_size=BATCH)
    else:
        options.deviceIterations(3)
        options.Training.gradientAccumulation(2)
        data = poptorch.DataLoader(options, TensorDataset(*samples), batch_size=BATCH)
        assert len(data) == 2
        steps = None
    poptorch.fit(
        model,
        data,
        epochs=2,
        steps_per_epoch=steps,
        steps_per_execution=per_execution,
        callbacks=[kept],
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        options=options,
        verbose=0,
    )
    accumulation = options.Training.gradient_accumulation
    expected = eager_losses(
        eager, [*loader, *loader], torch.optim.SGD(eager.parameters(), lr=0.1), accumulation
    )
    losses = torch.cat([logs["loss"] for logs in kept.logs])
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)


def test_an_iterator_is_asked_for_no_more_than_the_steps(loader):
    model, taken = make_model(), []

    def batches():
        for batch in loader:
            taken.append(1)
            yield batch

    rest = batches()
    poptorch.fit(
        model,
        rest,
        steps_per_epoch=5,
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        verbose=0,
    )
    assert len(taken) == 5
    assert len(list(rest)) == STEPS - 5


def test_metrics_are_computed_on_the_device(loader):
    model, kept = make_model(), Kept()
    history = poptorch.fit(
        model,
        loader,
        callbacks=[kept],
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        metrics=["accuracy", largest],
        verbose=0,
    )
    outputs = [(model(x), y) for x, y in loader]
    expected = torch.stack([(o.argmax(1) == y).float().mean() for o, y in outputs])
    torch.testing.assert_close(kept.logs[0]["accuracy"], expected)
    torch.testing.assert_close(
        kept.logs[0]["largest"], torch.stack([o.detach().max() for o, _ in outputs])
    )
    assert history["accuracy"] == pytest.approx([expected.mean().item()])
    assert list(history.epochs[0].means) == ["loss", "accuracy", "largest"]


def largest(output, target):
    return output.max()


def test_a_scheduler_steps_between_epochs(loader):
    model, kept = make_model(), Kept()
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)

    class Schedule:
        def on_epoch_end(self, epoch):
            scheduler.step()

    poptorch.fit(
        model,
        loader,
        epochs=2,
        callbacks=[kept, Schedule()],
        loss=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        verbose=0,
    )
    theirs = torch.optim.SGD(eager.parameters(), lr=0.5)
    eager_losses(eager, loader, theirs)
    theirs.param_groups[0]["lr"] = 0.05
    expected = eager_losses(eager, loader, theirs)
    torch.testing.assert_close(kept.logs[1]["loss"], expected, rtol=1e-4, atol=1e-5)


def test_a_training_model_brings_optimizer_and_options(loader):
    model, kept = WithLoss(), Kept()
    eager = copy.deepcopy(model.body)
    options = poptorch.Options()
    options.Training.gradientAccumulation(2)
    executor = poptorch.trainingModel(
        model, options, optimizer=poptorch.optim.SGD(model.parameters(), lr=0.1)
    )
    poptorch.fit(executor, loader, callbacks=[kept], verbose=0)
    expected = eager_losses(eager, loader, torch.optim.SGD(eager.parameters(), lr=0.1), 2)
    torch.testing.assert_close(kept.logs[0]["loss"], expected, rtol=1e-4, atol=1e-5)


def test_a_second_fit_goes_on_where_the_first_one_stopped(loader):
    model, kept = make_model(), Kept()
    eager = copy.deepcopy(model)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        poptorch.fit(
            model,
            loader,
            callbacks=[kept],
            loss=nn.CrossEntropyLoss(),
            optimizer=optimizer,
            verbose=0,
        )
    theirs = torch.optim.SGD(eager.parameters(), lr=0.1, momentum=0.9)
    expected = eager_losses(eager, [*loader, *loader], theirs)
    losses = torch.cat([logs["loss"] for logs in kept.logs])
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)


def test_gradients_of_an_outfeed_optimizer_are_printed_at_the_end_of_each_epoch(loader):
    model, lines = make_model(), []
    queue = poptorch.MaybeOutfeedQueue(filters=["0.weight"])
    optimizer = poptorch.OutfeedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), queue, model=model
    )
    poptorch.fit(
        model,
        loader,
        epochs=2,
        callbacks=[poptorch.OutfeedCallback(queue, "Gradients", print_function=lines.append)],
        loss=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        verbose=0,
    )
    assert lines.count("\nGradients") == 2
    assert lines.count("key: 0.weight_grad shape: (12, 9, 6)") == 2
    assert any("Epoch 2 - Summary Stats" in line for line in lines)


def test_a_pipeline(loader):
    model, kept = make_model(), Kept()
    eager = copy.deepcopy(model)
    poptorch.BeginBlock(model[0], ipu_id=0)
    poptorch.BeginBlock(model[2], ipu_id=1)
    options = poptorch.Options()
    options.Training.gradientAccumulation(4)
    poptorch.fit(
        model,
        loader,
        callbacks=[kept],
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        options=options,
        verbose=0,
    )
    expected = eager_losses(eager, loader, torch.optim.SGD(eager.parameters(), lr=0.1), 4)
    torch.testing.assert_close(kept.logs[0]["loss"], expected, rtol=1e-4, atol=1e-5)


def test_training_mode_is_put_back(loader):
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5))
    model.eval()
    seen = []

    class Mode:
        def on_epoch_begin(self, epoch):
            seen.append(model[1].training)

    poptorch.fit(
        model,
        loader,
        callbacks=[Mode()],
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        verbose=0,
    )
    assert seen == [True]
    assert not model.training and not model[1].training
