"""Faults in the middle of poptorch.fit: the model is as the finished steps left it."""

import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.error.running_loops import no_thread_stays  # noqa: F401

pytestmark = [
    pytest.mark.timeout(60, method="thread"),
    pytest.mark.usefixtures("no_thread_stays"),
]


class Batches:
    """An iterable that fails at the batch with this number."""

    def __init__(self, batches, broken):
        self.batches, self.broken = batches, broken

    def __iter__(self):
        for number, batch in enumerate(self.batches):
            if number == self.broken:
                raise OSError("the disk is gone")
            yield batch


class Seen:
    """A callback that keeps the losses that it gets."""

    def __init__(self):
        self.losses = []

    def on_batch_end(self, step, logs):
        assert step == len(self.losses)
        self.losses.append(float(logs["loss"]))


def test_the_data_fails_in_the_second_execution():
    generator = torch.Generator().manual_seed(3)
    batches = [
        (torch.randn(4, 3, generator=generator), torch.randint(2, (4,), generator=generator))
        for _ in range(8)
    ]
    model, loss = nn.Linear(3, 2), nn.CrossEntropyLoss()
    eager = copy.deepcopy(model)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    eager_optimizer = torch.optim.SGD(eager.parameters(), lr=0.1, momentum=0.9)

    def fit(data, told):
        poptorch.fit(
            model,
            data,
            epochs=1,
            steps_per_epoch=8,
            steps_per_execution=4,
            callbacks=[told],
            loss=loss,
            optimizer=optimizer,
            verbose=0,
        )

    def check(count, told):
        expected = []
        for x, y in batches[:count]:
            eager_optimizer.zero_grad()
            step_loss = loss(eager(x), y)
            step_loss.backward()
            eager_optimizer.step()
            expected.append(step_loss.item())
        torch.testing.assert_close(told.losses, expected, rtol=1e-5, atol=1e-6)
        for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)

    data, told = Batches(batches, 5), Seen()
    text = r"failed at element 5 .*the disk is gone.*\(iteration 1 of the loop, .*not begin"
    with pytest.raises(poptorch.Error, match=text):
        fit(data, told)
    check(5, told)
    data.broken, told = None, Seen()
    fit(data, told)
    check(8, told)
