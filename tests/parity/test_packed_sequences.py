"""Packed sequences in recurrent layers, with lengths that are known during the trace."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence

import popsim_torch as poptorch
from tests.sweeps import one_by_one

KINDS = [nn.LSTM, nn.GRU, nn.RNN]
FORMS = {
    "sorted": ([6, 4, 4, 1], True, {}),
    "not sorted": ([3, 6, 1, 3], False, {"batch_first": True}),
    "a tensor": (torch.tensor([2, 5, 5, 3]), False, {"bidirectional": True, "num_layers": 2}),
    "equal": ([4, 4, 4, 4], True, {"bias": False, "batch_first": True}),
    "two directions": ([5, 4, 2, 1], True, {"bidirectional": True, "batch_first": True}),
}


class Packing(nn.Module):
    def __init__(self, kind, lengths, enforce_sorted, *, with_states, total_length=None, **options):
        super().__init__()
        self.rnn = kind(3, 5, **options)
        self.lengths = lengths
        self.enforce_sorted = enforce_sorted
        self.total_length = total_length
        self.start = nn.Parameter(torch.randn(4, 5)) if with_states else None

    def forward(self, x):
        first = self.rnn.batch_first
        packed = pack_padded_sequence(x, self.lengths, first, self.enforce_sorted)
        states = None
        if self.start is not None:
            layers = self.rnn.num_layers * (2 if self.rnn.bidirectional else 1)
            states = self.start.expand(layers, -1, -1)
            states = (states, states * 0.5) if isinstance(self.rnn, nn.LSTM) else states
        y, final = self.rnn(packed, states)
        y, lengths = pad_packed_sequence(y, first, 0.25, self.total_length)
        final = final if isinstance(final, tuple) else (final,)
        loss = sum((one * self.weights(one)).sum() for one in (y.sin(), *final))
        return y, final, lengths.tolist(), poptorch.identity_loss(loss, "none")

    def weights(self, like):
        return torch.arange(1.0, like.numel() + 1).reshape(like.shape) / like.numel()


def check(net, x):
    eager = copy.deepcopy(net)
    y, final, lengths, loss = eager(x)
    loss.backward()
    model = poptorch.trainingModel(net, optimizer=torch.optim.SGD(net.parameters(), lr=1.0))
    own_y, own_final, own_lengths, _ = model(x)
    torch.testing.assert_close(own_y, y)
    for own, theirs in zip(own_final, final, strict=True):
        torch.testing.assert_close(own, theirs)
    assert own_lengths == lengths
    for own, theirs in zip(net.parameters(), eager.parameters(), strict=True):
        expected = theirs - theirs.grad
        torch.testing.assert_close(own.detach(), expected.detach(), rtol=1e-4, atol=1e-5)
    return model


@pytest.mark.parametrize(("kind", "form", "with_states"), one_by_one(KINDS, FORMS, [False, True]))
def test_values_and_gradients(kind, form, with_states):
    lengths, enforce_sorted, options = FORMS[form]
    net = Packing(kind, lengths, enforce_sorted, with_states=with_states, **options)
    x = torch.randn(4, 6, 3) if net.rnn.batch_first else torch.randn(6, 4, 3)
    model = check(net, x)
    # One op for all steps with the same number of sequences, in each layer and direction.
    ops = [line for line in model.program().splitlines() if "= recurrent(" in line]
    layers = net.rnn.num_layers * (2 if net.rnn.bidirectional else 1)
    assert len(ops) == layers * len(set(map(int, lengths)))


def test_more_steps_than_the_longest_sequence_has():
    net = Packing(nn.GRU, [2, 3, 3, 1], False, with_states=False, total_length=5)
    check(net, torch.randn(6, 4, 3))


def test_a_list_of_sequences():
    class Listing(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(3, 5)

        def forward(self, x):
            packed = pack_sequence([x[:2], x, x[1:]], enforce_sorted=False)
            _, (h, _) = self.rnn(packed._replace(data=packed.data * 2))
            return h

    net, x = Listing(), torch.randn(5, 3)
    torch.testing.assert_close(poptorch.inferenceModel(copy.deepcopy(net))(x), net(x).detach())


@pytest.mark.parametrize(
    ("lengths", "text"),
    [
        ([1, 2, 3, 4], "sorted in decreasing order"),
        ([4, 3, 2, 0], "greater than 0"),
        ([9, 3, 2, 1], "more than the 6 steps"),
        ([3, 2, 1], "equal to batch_size"),
    ],
)
def test_lengths_that_do_not_fit(lengths, text):
    net = Packing(nn.GRU, lengths, True, with_states=False)
    model = poptorch.trainingModel(net, optimizer=torch.optim.SGD(net.parameters(), lr=1.0))
    with pytest.raises(RuntimeError, match=text):
        model(torch.randn(6, 4, 3))


def test_a_layer_with_a_projection_is_refused():
    net = Packing(nn.LSTM, [4, 3, 2, 1], True, with_states=False, proj_size=2)
    model = poptorch.trainingModel(net, optimizer=torch.optim.SGD(net.parameters(), lr=1.0))
    with pytest.raises(poptorch.Error, match=r"proj_size must be 0. Pass the padded sequence"):
        model(torch.randn(6, 4, 3))


def test_lengths_that_only_a_run_knows_are_refused():
    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(3, 5)

        def forward(self, x, lengths):
            return self.rnn(pack_padded_sequence(x, lengths))[1]

    with pytest.raises(poptorch.Error, match=r"lengths as Python numbers.* pass the padded"):
        poptorch.inferenceModel(Given())(torch.randn(6, 4, 3), torch.tensor([4, 3, 2, 1]))
