"""Anchors of whole epochs: read from the executor, the history and callbacks."""

import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import OutputMode
from tests.options import make_options

GRADIENT = "Gradient___fc.weight"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        return self.fc(x)


BATCHES = [(torch.randn(4, 3), torch.randint(0, 2, (4,))) for _ in range(4)]
CROSS_ENTROPY = nn.functional.cross_entropy


def anchored(name=GRADIENT, mode=OutputMode.All, d=1):
    options = make_options(d)
    options.anchorTensor("it", name, mode)
    return options


def eager_gradients(net, epochs=1):
    """Train a copy in eager PyTorch; return the gradient of each step."""
    net, found = copy.deepcopy(net), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for x, y in BATCHES * epochs:
        optimizer.zero_grad()
        CROSS_ENTROPY(net(x), y).backward()
        found.append(net.fc.weight.grad.clone())
        optimizer.step()
    return torch.cat(found)


def executor(net, options):
    return poptorch.trainingModel(net, options, torch.optim.SGD(net.parameters(), lr=0.1))


def test_an_executor_has_what_its_fit_recorded():
    net = Net()
    expected = eager_gradients(net)
    model = executor(net, anchored())
    history = poptorch.fit(model, BATCHES, loss=CROSS_ENTROPY, verbose=0)
    torch.testing.assert_close(model.getAnchoredTensor("it"), expected)
    assert torch.equal(history.anchors["it"], model.getAnchoredTensor("it"))
    with pytest.raises(AssertionError, match=r"No tensor with name 'its'.* Closest name: 'it'"):
        model.getAnchoredTensor("its")


def test_the_history_has_what_a_plain_module_recorded():
    net = Net()
    expected = eager_gradients(net, 2)[-8:]
    history = poptorch.fit(
        net,
        BATCHES,
        epochs=2,
        loss=CROSS_ENTROPY,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        options=anchored(),
        verbose=0,
    )
    torch.testing.assert_close(history.anchors["it"], expected)
    assert list(history.anchors) == ["it"]
    assert "it" in history.anchors
    assert len(history.anchors) == 1


def test_callbacks_read_anchors_behind_each_epoch():
    net, seen = Net(), []
    expected = eager_gradients(net, 2)

    class Callback:
        def on_epoch_end(self, epoch, logs, anchors):
            seen.append((anchors["it"], model.getAnchoredTensor("it")))

    model = executor(net, anchored())
    poptorch.fit(model, BATCHES, 2, loss=CROSS_ENTROPY, callbacks=Callback(), verbose=0)
    for (first, second), part in zip(seen, expected.chunk(2), strict=True):
        torch.testing.assert_close(first, part)
        assert torch.equal(first, second)


@pytest.mark.parametrize("call", ["__call__", "profile"])
def test_a_later_call_of_the_executor_is_the_one_that_counts(call):
    class WithLoss(Net):
        def forward(self, x, y=None):
            out = self.fc(x)
            return out if y is None else (out, CROSS_ENTROPY(out, y))

    net = WithLoss()
    model = executor(net, anchored())
    poptorch.fit(model, BATCHES, loss=CROSS_ENTROPY, verbose=0)
    assert model.getAnchoredTensor("it").shape == (8, 3)
    getattr(model, call)(*BATCHES[0])
    assert model.getAnchoredTensor("it").shape == (2, 3)


def test_an_executor_of_inference_reads_what_evaluate_and_predict_recorded():
    net = Net()
    model = poptorch.inferenceModel(net, anchored("fc/Gemm:0"))
    expected = torch.cat([net(x) for x, _ in BATCHES]).detach()
    poptorch.evaluate(model, BATCHES, loss=CROSS_ENTROPY, verbose=0)
    torch.testing.assert_close(model.getAnchoredTensor("it"), expected)
    poptorch.predict(model, [(x,) for x, _ in BATCHES[:2]])
    torch.testing.assert_close(model.getAnchoredTensor("it"), expected[:8])


def test_anchors_of_a_training_program_do_not_concern_its_evaluation():
    model = executor(Net(), anchored())
    poptorch.fit(model, BATCHES, loss=CROSS_ENTROPY, verbose=0)
    recorded = model.getAnchoredTensor("it")
    poptorch.evaluate(model, BATCHES, loss=CROSS_ENTROPY, verbose=0)
    assert torch.equal(model.getAnchoredTensor("it"), recorded)


@pytest.mark.parametrize("function", [poptorch.evaluate, poptorch.predict])
def test_anchors_that_nobody_could_read_are_refused(function):
    options = anchored("fc/Gemm:0")
    with pytest.raises(ValueError, match=r"anchors \(it\), and there is no executor.*inferenceM"):
        function(Net(), BATCHES, options=options)


def test_a_fit_that_a_callback_ends_keeps_the_anchors_of_the_latest_run():
    class Callback:
        def on_epoch_end(self, epoch):
            raise StopIteration

    net = Net()
    expected = eager_gradients(net)
    model = executor(net, anchored())
    history = poptorch.fit(model, BATCHES, 3, loss=CROSS_ENTROPY, callbacks=Callback(), verbose=0)
    assert len(history) == 1
    torch.testing.assert_close(history.anchors["it"], expected)


def test_a_fit_that_fails_says_that_nothing_was_recorded():
    def fails():
        yield from BATCHES[:3]
        raise OSError("no more")

    model = executor(Net(), anchored())
    with pytest.raises(poptorch.Error):
        poptorch.fit(model, fails(), 1, 4, loss=CROSS_ENTROPY, verbose=0)
    with pytest.raises(AssertionError, match="No tensor with name 'it' yet"):
        model.getAnchoredTensor("it")
