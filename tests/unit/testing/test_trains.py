"""``assert_trains``: a healthy model passes, and each mistake breaks its rule."""

import math

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.errors import UsageTypeError, UsageValueError
from popsim_torch.testing import assert_trains
from tests.options import make_options

CROSS_ENTROPY = nn.CrossEntropyLoss()


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def batches(count=10, size=32):
    """Return samples that a linear model separates, in batches."""
    torch.manual_seed(1)
    direction = torch.randn(8, 3)
    inputs = [torch.randn(size, 8) for _ in range(count)]
    return [(x, (x @ direction).argmax(1)) for x in inputs]


def check(model, lr=0.1, **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    settings = {"optimizer": optimizer, "loss": CROSS_ENTROPY, **settings}
    return assert_trains(model, batches(), **settings)


def broken(model, **settings):
    """Return the lines about broken rules, by what they name."""
    with pytest.raises(AssertionError) as caught:
        check(model, **settings)
    first, *lines = str(caught.value).splitlines()
    rules = [line.partition(". ")[2].partition(": ") for line in lines]
    assert first.startswith(f"{type(model).__name__} breaks {len(lines)} rule")
    assert [line.partition(".")[0] for line in lines] == [
        str(number) for number in range(1, len(lines) + 1)
    ]
    return {name: text for name, _, text in rules}


def test_a_healthy_model_passes_and_keeps_its_weights():
    model = mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    measures = check(model)
    assert measures.num_steps == 20
    assert measures.losses[-1] < measures.losses[0]
    assert set(measures.changes) == set(before)
    assert set(measures.update_ratios) == {"0.weight", "2.weight"}
    assert all(0 < ratio < 0.1 for ratio, _ in measures.update_ratios.values())
    assert 0.2 < measures.zero_shares["1/Relu:0"] < 0.8
    assert measures.not_finite == []
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    check(model)  # it can be trained again


def test_digits_are_learnt(mnist_root):
    def read(name, header, count, *shape):
        data = (mnist_root / "MNIST" / "raw" / name).read_bytes()
        values = torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=header)
        return values[: 1280 * count].reshape(1280, *shape)

    images = read("train-images-idx3-ubyte", 16, 784, 28, 28).float() / 255
    labels = read("train-labels-idx1-ubyte", 8, 1).long()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), 64)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = poptorch.optim.Adam(model.parameters(), lr=1e-3)
    measures = assert_trains(
        model, loader, loss=CROSS_ENTROPY, optimizer=optimizer, loss_falls_by=0.15
    )
    assert measures.num_steps == 20


def test_the_measures_are_those_of_eager_training():
    model = mlp()
    measures = check(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, ratios, zeros = [], {}, []
    for x, y in batches() * 2:
        optimizer.zero_grad()
        zeros.append((model[:2](x) == 0).double().mean().item())
        loss = CROSS_ENTROPY(model(x), y)
        losses.append(loss.item())
        loss.backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters() if p.dim() > 1}
        optimizer.step()
        for name, value in before.items():
            ratio = (model.get_parameter(name) - value).norm() / value.norm()
            ratios[name] = max(ratios.get(name, 0.0), ratio.item())
    assert measures.losses == pytest.approx(losses, rel=1e-4)
    assert {n: r for n, (r, _) in measures.update_ratios.items()} == pytest.approx(ratios, rel=1e-3)
    assert measures.zero_shares["1/Relu:0"] == pytest.approx(min(zeros), abs=0.01)


# Each rule


def test_weights_that_begin_at_zero():
    model = mlp()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    found = broken(model)
    assert {"0.weight", "0.bias", "2.weight"} <= set(found)
    assert found["0.weight"].startswith("its gradient is 0 everywhere in all 20 steps")
    assert "initialisation" in found["0.weight"]
    assert "2.bias" not in found


def test_a_learning_rate_that_is_too_large():
    found = broken(mlp(), lr=10.0)
    assert "at most 0.1 are allowed" in found["0.weight"]
    assert "Try a smaller learning rate" in found["0.weight"]
    assert "Gradient" not in "".join(found)


def test_training_that_ends_in_nan():
    found = broken(mlp(), lr=1e4)
    (last,) = [text for text in found.values() if "all have to be finite" in text]
    assert "NaN" in last
    assert "Gradient___0.weight" in last
    assert "of its own norm in step" in found["0.weight"]


def test_a_detached_layer():
    class Detached(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x):
            return self.last(torch.relu(self.first(x)).detach())

    found = broken(Detached())
    assert set(found) == {"first.weight", "first.bias"}
    assert found["first.weight"].startswith("it has no gradient")
    assert "detach()" in found["first.weight"]


def test_a_layer_that_is_never_called():
    model = mlp()
    model.spare = nn.Linear(2, 2)
    model.forward = lambda x: model[2](model[1](model[0](x)))
    assert set(broken(model)) == {"spare.weight", "spare.bias"}


def test_a_dead_relu():
    model = mlp()
    nn.init.constant_(model[0].bias, -100.0)
    found = broken(model)
    assert found["1/Relu:0"].startswith("at least 100.0% of its values are 0 in every step; below")
    assert "its bias" in found["1/Relu:0"]
    assert "1/Relu:0" not in broken(model, dead_share=None)


def test_a_layer_that_is_frozen_by_mistake():
    model = mlp()
    model[0].weight.requires_grad_(False)
    found = broken(model)
    assert set(found) == {"0.weight"}
    assert "pass frozen='0.weight' if that is meant" in found["0.weight"]
    check(model, frozen="0.weight")
    check(model, frozen=["0.*"])
    check(model, frozen=poptorch.tensors.of_module("0"))


def test_a_learning_rate_of_zero():
    found = broken(mlp(), lr=0.0)
    assert found["2.bias"].startswith("it does not change in all 20 steps, although its gradient")
    assert "is its learning rate above 0?" in found["2.bias"]


def test_a_loss_that_does_not_fall_enough():
    found = broken(mlp(), loss_falls_by=0.99)
    assert set(found) == {"loss"}
    assert found["loss"].startswith("it falls by ")
    assert "(99%)" in found["loss"]
    check(mlp(), lr=1e-5, loss_falls_by=None)


def test_limits_can_be_changed():
    assert set(broken(mlp(), most_update_ratio=1e-4)) == {"0.weight", "2.weight"}
    check(mlp(), most_update_ratio=None)
    assert set(broken(mlp(), dead_share=0.2)) == {"1/Relu:0"}


# How it is called


class WithLoss(nn.Module):
    """A model that returns its result and its loss."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x, y):
        out = self.net(x)
        return out, CROSS_ENTROPY(out, y)


def test_a_model_that_returns_its_loss():
    model = WithLoss()
    measures = assert_trains(
        model, batches(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    assert set(measures.changes) == {f"net.{name}" for name in mlp().state_dict()}
    assert "net/1/Relu:0" in measures.zero_shares
    assert assert_trains(WithLoss(), batches(), steps=5, loss_falls_by=None).num_steps == 5


@pytest.mark.parametrize(("d", "ga"), [(2, 1), (1, 4), (2, 2)])
def test_several_micro_batches_in_a_step(d, ga):
    options = make_options(d, ga)
    measures = check(mlp(), options=options, loss_falls_by=None)
    assert measures.num_steps == 20
    assert all(math.isfinite(loss) for loss in measures.losses)
    assert options.anchored_tensors == {}
    alone = check(mlp(), loss_falls_by=None)
    assert measures.zero_shares.keys() == alone.zero_shares.keys()


def test_a_model_without_a_relu_gives_no_warning(caplog):
    check(nn.Sequential(nn.Linear(8, 3)))
    assert caplog.records == []


def test_few_batches_are_repeated_and_an_iterator_is_enough():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = iter(batches(2))
    measures = assert_trains(model, data, 8, loss=CROSS_ENTROPY, optimizer=optimizer)
    assert measures.num_steps == 8


@pytest.mark.parametrize(
    ("settings", "kind", "text"),
    [
        ({"steps": 0}, UsageValueError, "steps=0; pass a positive integer"),
        ({"steps": True}, UsageValueError, "steps=True"),
        ({"data": []}, UsageValueError, "the data has no batches"),
        ({"data": torch.zeros(2)}, UsageTypeError, "the data is a Tensor. Pass a list of batches"),
        ({"data": 3}, UsageTypeError, "the data is a int"),
        ({"model": "net"}, UsageTypeError, "the model is a str. Pass a torch.nn.Module"),
        ({"frozen": 3}, UsageTypeError, "frozen: a int selects no tensors"),
    ],
)
def test_wrong_arguments(settings, kind, text):
    given = {"model": mlp(), "data": batches(1), "loss": CROSS_ENTROPY, **settings}
    with pytest.raises(kind) as caught:
        assert_trains(**given)
    assert text in str(caught.value)


def test_a_model_that_does_not_return_its_loss():
    class Silent(WithLoss):
        def forward(self, x, y):
            return super().forward(x, y)[0]

    with pytest.raises(UsageValueError, match="Return the loss, alone or last, or pass loss="):
        assert_trains(Silent(), batches())


def test_an_exception_leaves_the_model_as_it_was():
    model = mlp()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def failing():
        yield from batches(2)
        raise KeyError("no more")

    with pytest.raises(KeyError):
        assert_trains(model, failing(), loss=CROSS_ENTROPY)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    check(model)
