"""Tables that ask for sparse gradients: on the device gradients are dense, with the same values."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.parity.compare import Pair
from tests.parity.tolerances import TRAINED


class Words(nn.Module):
    def __init__(self, sparse, bag):
        super().__init__()
        kind = nn.EmbeddingBag if bag else nn.Embedding
        self.words = kind(7, 4, sparse=sparse)
        self.head = nn.Linear(4, 3)

    def forward(self, i, y):
        x = self.words(i)
        out = self.head(x if x.dim() == 2 else x.mean(1))
        return out, F.cross_entropy(out, y)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("bag", [False, True], ids=["embedding", "bag"])
def test_updates_are_those_of_a_dense_gradient(bag, momentum):
    pair = Pair(
        Words(sparse=True, bag=bag),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum),
        tolerance=TRAINED[torch.float32],
    )
    # The twin's gradients can be compared and added up when they are dense.
    pair.twin.words.sparse = False
    for _ in range(3):
        pair.step(torch.randint(0, 7, (6, 5)), torch.randint(0, 3, (6,)))
    pair.finish()
    assert pair.model.words.sparse
