"""Tensors that forward makes by a class: ``torch.FloatTensor(2, 3)``."""

import torch
from torch import nn

from tests.parity.functions import compare_with_eager, in_both


def filled_row_by_row(model, x):
    out = torch.Tensor(2, 3)
    for row in range(2):
        out[row] = model.fc(x[row])
    return out


CALLS = {
    "size": lambda _, x: x + torch.FloatTensor(x.size()).fill_(1),
    "sizes": lambda _, x: torch.Tensor(4, 4).zero_() + x[0],
    "factor": lambda _, x: torch.Tensor(1).fill_(2.0) * x,
    "nothing": lambda _, x: torch.cat([torch.Tensor(), x.view(-1)]),
    "half": lambda _, x: torch.HalfTensor(2, 4).fill_(1.5) + x.half(),
    "double": lambda _, x: (torch.DoubleTensor(2, 4).fill_(1.5) + x).to(x.dtype),
    "bool": lambda _, x: torch.BoolTensor(2, 4).fill_(True) & (x > 0.5),
    "indices": lambda _, x: torch.zeros(2, 4).scatter(1, torch.LongTensor(2, 1).fill_(1), 1.0) + x,
    "init": lambda _, x: nn.init.constant_(torch.Tensor(4), 1.0) + x,
    "parameter": lambda _, x: nn.init.ones_(nn.Parameter(torch.Tensor(2, 4))).detach() * x,
    "data": lambda _, x: torch.FloatTensor([1, 2, 3, 4]) + x,
    "out": lambda _, x: torch.add(x, x, out=torch.FloatTensor(2, 4)),
    "known": lambda _, x: 2 * x if torch.Tensor(1).fill_(3.0).item() > 2 else x,
    "vmap": lambda _, x: torch.vmap(lambda row: row + torch.Tensor(4).fill_(1))(x),
    "rows": filled_row_by_row,
}


@in_both(CALLS)
def test_like_eager(function, kind):
    compare_with_eager(function, kind)


def test_drawn_numbers():
    def drawn(_, x):
        numbers = torch.Tensor(1000).uniform_(1, 2)
        return numbers.min() >= 1, numbers.max() <= 2, numbers.std() > 0.2, x

    compare_with_eager(drawn, "inference")
