"""Rules of the user in the body of a loop that trains on the device."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.parity.user_rules import batches


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.last = nn.Linear(4, 4), nn.Linear(4, 3)


class InHalf(Model):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.float16):
            return self.last(self.fc(x).tanh()).float().square().mean()


class Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.tensor([1.0, 2, 3, 4])


class WithRules(Model):
    def forward(self, x):
        y = self.fc(x)
        y.register_hook(lambda g: g * torch.ones(4) * 2)
        return self.last(Weighted.apply(y)).square().mean()


class Clipped(Model):
    def forward(self, x):
        self.fc.weight.data.clamp_(-0.3, 0.3)
        return self.last(self.fc(x)).square().mean()


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


@pytest.mark.parametrize(
    ("kind", "tolerance"), [(InHalf, 1e-3), (WithRules, 1e-6), (Clipped, 1e-6)]
)
def test_it_trains_as_in_eager_pytorch(kind, tolerance):
    model, twin = kind(), kind()
    optimizer, queue = momentum(model), poptorch.InfeedQueue(batches())

    def body(x):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()

    poptorch.function(lambda: poptorch.repeat(3, body, infeed=queue))()
    expected = momentum(twin)
    for x in batches():
        expected.zero_grad()
        twin(x).backward()
        expected.step()
    torch.testing.assert_close(
        dict(model.state_dict()), dict(twin.state_dict()), rtol=tolerance, atol=tolerance
    )


def test_assigned_data_in_a_training_loop_are_refused():
    class Assigns(Model):
        def forward(self, x):
            self.fc.weight.data = self.fc.weight.data.clamp(-0.3, 0.3)
            return self.last(self.fc(x)).square().mean()

    model = Assigns()
    optimizer, queue = momentum(model), poptorch.InfeedQueue(batches())

    def body(x):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()

    with pytest.raises(poptorch.Error, match=r"Assigning Tensor\.data .* is not supported"):
        poptorch.function(lambda: poptorch.repeat(3, body, infeed=queue))()
