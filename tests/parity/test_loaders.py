"""Training from loaders in every mode: the same bits."""

import pytest
import torch
from torch.utils.data import TensorDataset

import popsim_torch as poptorch
from tests.options import make_options


class WithLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.linear = torch.nn.Linear(5, 3)

    def forward(self, x, y):
        out = self.linear(x)
        return out, torch.nn.functional.cross_entropy(out, y)


def trained_weight(mode, keep_batches):
    torch.manual_seed(2)
    data = TensorDataset(torch.randn(48, 5), torch.randint(0, 3, (48,)))
    options = make_options(d=2, ga=3)
    loader = poptorch.DataLoader(
        options,
        data,
        batch_size=2,
        shuffle=True,
        generator=torch.Generator().manual_seed(3),
        mode=mode,
        async_options={"sharing_strategy": poptorch.SharingStrategy.Fork},
    )
    model = WithLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = poptorch.trainingModel(model, options, optimizer)
    batches = list(loader) if keep_batches else loader
    for _ in range(2):
        for x, y in batches:
            train(x, y)
    return model.linear.weight.detach().clone()


@pytest.mark.parametrize("keep_batches", [False, True])
def test_every_mode_trains_the_same_weights(keep_batches):
    expected = trained_weight(poptorch.DataLoaderMode.Sync, keep_batches)
    for mode in (poptorch.DataLoaderMode.Async, poptorch.DataLoaderMode.AsyncRebatched):
        assert torch.equal(trained_weight(mode, keep_batches), expected)
