"""What an exchange carries, and how it adds up."""

import pytest
import torch

from popsim_torch.errors import Error
from popsim_torch.processes.exchange import GradientExchange
from popsim_torch.processes.peers import tree_sum
from popsim_torch.processes.traffic import Traffic


class Two:
    """Stands for the other process: what it sends, as if it were the first one's twin."""

    rank, size = 0, 2

    def __init__(self, other):
        self.other = other

    def sum(self, numbers, what):
        numbers += self.other

    def gather(self, tensor, what):
        return torch.stack([tensor, tensor])


def exchange_with(other, **values):
    exchange = GradientExchange(Two(other), 3, lambda: "lr 0.1")
    exchange.note(values)
    exchange.numbers.copy_(torch.tensor([1.0, 2.0, 3.0]))
    exchange.sum()
    return exchange


def sent_by(rank, text="lr 0.1", **values):
    """Return all numbers that a process sends."""

    class Alone(Two):
        def sum(self, numbers, what):
            self.sent = numbers.clone()
            numbers[3:11] = numbers[3:11].view(2, -1)[rank].repeat(2)

    peers = Alone(None)
    peers.rank = rank
    exchange = GradientExchange(peers, 3, lambda: text)
    exchange.note(values)
    exchange.numbers.copy_(torch.tensor([10.0, 20.0, 30.0]))
    exchange.sum()
    return peers.sent


def test_equal_processes():
    exchange = exchange_with(sent_by(1, w=torch.ones(2)), w=torch.ones(2))
    assert exchange.numbers.tolist() == [11, 22, 33]
    assert exchange.traffic.exchanges == 1
    assert exchange.traffic.bytes == 4 * (3 + 2 * 2 * 2 + 1)  # numbers, signs, padding


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"text": "lr 0.2"}, "have different hyper-parameters"),
        ({"w": torch.zeros(2)}, "have written different values"),
        ({"w": torch.ones(2), "v": torch.ones(1)}, "have written different values"),
        ({}, "have written different values"),
    ],
)
def test_signs_that_differ(other, message):
    other = other if "text" not in other else {**other, "w": torch.ones(2)}
    with pytest.raises(Error, match=f"process 1 of 2 and process 0 {message}"):
        exchange_with(sent_by(1, **other), w=torch.ones(2))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 7])
def test_sums_are_those_of_neighbours(size):
    parts = [torch.tensor([float(2**i)]) for i in range(size)]
    assert tree_sum(parts).item() == 2**size - 1
    odd = [torch.tensor([x]) for x in (1e8, 1.0, -1e8, 1.0)]
    assert tree_sum(odd).item() == ((odd[0] + odd[1]) + (odd[2] + odd[3])).item()


def test_traffic_as_text():
    assert str(Traffic(2, 800, 0.5)) == "2 exchanges of gradients, 800 bytes sent, 0.500 s"
