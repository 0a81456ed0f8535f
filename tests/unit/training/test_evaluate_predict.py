"""evaluate and predict run the model in evaluation mode, on all of the data."""

from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import popsim_torch as poptorch


@pytest.fixture
def samples():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(48, 6, generator=generator)
    return x, torch.randint(0, 4, (48,), generator=generator)


@pytest.fixture
def loader(samples):
    return DataLoader(TensorDataset(*samples), batch_size=8)


@pytest.fixture
def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.5), nn.Linear(9, 4))


@pytest.mark.parametrize("per_execution", [None, 2])
def test_evaluate(model, loader, samples, per_execution):
    found = poptorch.evaluate(
        model,
        loader,
        steps_per_execution=per_execution,
        loss=nn.CrossEntropyLoss(),
        metrics="accuracy",
        verbose=0,
    )
    assert model.training and model[2].training
    before = model[1].running_mean.clone()
    model.eval()
    output = model(samples[0])
    assert found == {
        "loss": pytest.approx(nn.functional.cross_entropy(output, samples[1]).item(), rel=1e-5),
        "accuracy": pytest.approx((output.argmax(1) == samples[1]).float().mean().item()),
    }
    assert torch.equal(model[1].running_mean, before)


def test_callbacks_of_steps_are_called(model, loader):
    class Steps:
        seen: ClassVar[list] = []

        def on_batch_end(self, step, logs):
            self.seen.append((step, logs["loss"].item()))

    found = poptorch.evaluate(
        model, loader, callbacks=[Steps()], loss=nn.CrossEntropyLoss(), verbose=0
    )
    assert [step for step, _ in Steps.seen] == list(range(6))
    assert sum(loss for _, loss in Steps.seen) / 6 == pytest.approx(found["loss"])


@pytest.mark.parametrize("per_execution", [None, 3])
def test_predict_leaves_the_target_out(model, loader, samples, per_execution):
    found = poptorch.predict(model, loader, steps_per_execution=per_execution)
    torch.testing.assert_close(found, model.eval()(samples[0]).detach())


def test_predictions_keep_the_structure_of_outputs(samples):
    class Two(nn.Module):
        def forward(self, x):
            return {"twice": 2 * x, "more": (x.sum(), x + 1)}

    batches = list(samples[0].split(8))
    found = poptorch.predict(Two(), batches, steps_per_execution=2)
    torch.testing.assert_close(found["twice"], 2 * samples[0])
    torch.testing.assert_close(found["more"][0], torch.stack([b.sum() for b in batches]))
    torch.testing.assert_close(found["more"][1], samples[0] + 1)


def test_fewer_steps_than_the_data_has(model, samples):
    loader = DataLoader(TensorDataset(samples[0]), batch_size=9)  # the last batch is smaller
    assert poptorch.predict(model, loader, steps=5).shape == (45, 4)


def test_predictions_while_trained_weights_are_on_the_device(model, loader, samples):
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(6, 4)

        def forward(self, x, y=None):
            output = self.body(x)
            return output if y is None else (output, nn.functional.cross_entropy(output, y))

    module = WithLoss()
    executor = poptorch.trainingModel(
        module, optimizer=poptorch.optim.SGD(module.parameters(), lr=0.5)
    )
    before = module.body.weight.detach().clone()
    executor(samples[0][:8], samples[1][:8])
    found = poptorch.predict(executor, [x for x, _ in loader])
    torch.testing.assert_close(found, module.body(samples[0]).detach())
    assert not torch.equal(module.body.weight, before)
