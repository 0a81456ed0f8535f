"""The element type in which gradients are accumulated, chosen by options."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.errors import Error, UsageTypeError
from tests.options import make_options

COUNT = 4
HALF, FLOAT = torch.float16, torch.float32


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        return poptorch.identity_loss(self.last(self.first(x).tanh()).square(), "mean")


def batches():
    return torch.randn(3 * COUNT, 2, 6, generator=torch.Generator().manual_seed(2))


def trained(options=None, optimizer=None):
    """Return a model that was trained for three updates, and the types of its accumulators."""
    torch.manual_seed(0)
    model = Net()
    options = make_options() if options is None else options
    options.Training.gradientAccumulation(COUNT)
    made = (optimizer or (lambda p: torch.optim.SGD(p, lr=0.5)))(model.parameters())
    trainer = poptorch.trainingModel(model, options, made)
    for x in batches().reshape(3, 2 * COUNT, 6):
        trainer(x)
    tensors = trainer.compiled.program.graph.tensors
    found = {
        tensor.name.removeprefix("Accum___"): str(tensor.dtype)
        for tensor in tensors
        if tensor.name.startswith("Accum___")
    }
    weights = {name: one.detach().clone() for name, one in model.named_parameters()}
    trainer.destroy()
    return weights, found


def by_hand(dtype_of):
    """Train in PyTorch, and add gradients up in those types."""
    torch.manual_seed(0)
    model = Net()
    for update in batches().reshape(3, COUNT, 2, 6):
        sums = {
            name: torch.zeros_like(p, dtype=dtype_of(p)) for name, p in model.named_parameters()
        }
        for x in update:
            model.zero_grad()
            model(x).backward()
            for name, parameter in model.named_parameters():
                sums[name] = (sums[name].float() + parameter.grad).to(sums[name].dtype)
        for name, parameter in model.named_parameters():
            parameter.data -= 0.5 * sums[name].float() / COUNT
    return {name: one.detach() for name, one in model.named_parameters()}


CHOICES = {
    "half": (HALF, lambda p: HALF),
    "float": (FLOAT, lambda p: FLOAT),
    "by parameter": (lambda p: HALF if p.dim() == 2 else FLOAT,) * 2,
}


@pytest.mark.parametrize(("choice", "dtype_of"), CHOICES.values(), ids=CHOICES)
def test_values(choice, dtype_of):
    options = make_options()
    options.Training.gradientAccumulationDtype(choice)
    weights, found = trained(options)
    shapes = {name: one.dim() for name, one in weights.items()}
    expected = {name: dtype_of(torch.zeros([1] * dim)) for name, dim in shapes.items()}
    assert found == {name: str(dtype) for name, dtype in expected.items()}
    torch.testing.assert_close(weights, by_hand(dtype_of), rtol=0, atol=2e-6)
    if choice is not FLOAT:
        assert any(not torch.equal(weights[name], trained()[0][name]) for name in weights)


def test_it_is_what_optimizers_of_poptorch_do():
    def running(kind):
        options = make_options()
        options.Training.gradientAccumulationDtype(kind)
        running_mean = poptorch.MeanReductionStrategy.Running
        options.Training.setMeanAccumulationAndReplicationReductionStrategy(running_mean)
        return options

    def sgd(kind):
        return lambda p: poptorch.optim.SGD(p, lr=0.5, accum_type=kind)

    # Their accumulators hold the running mean where they are float16.
    theirs = trained(optimizer=sgd(HALF))
    assert_same(trained(running(HALF)), theirs)
    assert_same(trained(running(HALF), sgd(FLOAT)), theirs)
    assert_same(trained(running(FLOAT), sgd(HALF)), trained(running(None), sgd(FLOAT)))


def assert_same(ours, theirs):
    assert ours[1] == theirs[1]
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=0)


def test_pipelining_options():
    options = make_options()
    settings = poptorch.set_gradient_accumulation_options(
        options, COUNT, gradient_accumulation_dtype=HALF
    )
    assert "in effect: accumulators have this type" in settings.explain()
    assert set(trained(options)[1].values()) == {"torch.float16"}


def test_loops():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options = make_options()
    options.Training.gradientAccumulationDtype(HALF)
    options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Mean)
    infeed = poptorch.InfeedQueue(batches())

    @poptorch.function(options=options)
    def train():
        def body(x):
            loss = model(x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        poptorch.repeat(3 * COUNT, body, infeed=infeed, gradient_accumulation=COUNT)

    train()
    weights = {name: one.detach().clone() for name, one in model.named_parameters()}
    torch.testing.assert_close(weights, by_hand(lambda p: HALF), rtol=0, atol=2e-6)
    infeed.close()


def piped(choice=None, optimizer=torch.optim.SGD, options=None, dtype=HALF):
    """Train stages for an update; return the types of accumulators, and the weights."""
    torch.manual_seed(0)
    model = Net().to(dtype)
    model.last.float()
    made = optimizer(model.parameters(), lr=0.5)
    infeed = poptorch.InfeedQueue(batches()[:COUNT])
    # (None is as good as nothing)
    given = {} if choice is None else {"gradient_accumulation_dtype": choice}

    @poptorch.function(options=options)
    def train():
        poptorch.pipeline(
            [lambda x: model.first(x.to(dtype)), lambda x: model.last(x.tanh().float()).sum()],
            COUNT,
            infeed_queue=infeed,
            outfeed_queue=poptorch.OutfeedQueue(),
            optimizer_function=lambda loss: (made, loss),
            **given,
        )

    train()
    tensors = train.programs[0].compiled.program.graph.tensors
    found = {
        tensor.name.removeprefix("Accum___"): str(tensor.dtype)
        for tensor in tensors
        if tensor.name.startswith("Accum___")
    }
    weights = {name: one.detach().clone() for name, one in model.named_parameters()}
    train.destroy()
    infeed.close()
    return weights, found


def test_pipelines_accumulate_in_the_type_of_the_weights():
    weights, found = piped()
    assert sorted(found.values()) == [str(HALF)] * 2 + [str(FLOAT)] * 2
    assert_same(piped(lambda v: v.dtype), (weights, found))
    others = piped(FLOAT)
    assert set(others[1].values()) == {str(FLOAT)}
    assert any(not torch.equal(weights[name], others[0][name]) for name in weights)
    # (the device has float32 in the place of float64)
    assert set(piped(dtype=torch.float64)[1].values()) == {str(FLOAT)}


def test_pipelines_take_the_type_that_options_or_optimizers_choose():
    def sgd(**chosen):
        return lambda p, lr: poptorch.optim.SGD(p, lr=lr, **chosen)

    options = make_options()
    options.Training.gradientAccumulationDtype(FLOAT)
    assert set(piped(options=options)[1].values()) == {str(FLOAT)}
    assert set(piped(optimizer=sgd())[1].values()) == {str(HALF), str(FLOAT)}
    combined = sgd(momentum=0.9, use_combined_accum=True)
    assert not piped(optimizer=combined)[1]


def test_without_accumulation_nothing_changes():
    torch.manual_seed(0)
    model, options = Net(), make_options()
    options.Training.gradientAccumulationDtype(HALF)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = poptorch.trainingModel(model, options, optimizer)
    trainer(torch.ones(2, 6))
    assert not [n for n in trainer.getTensorNames() if n.startswith("Accum___")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, "half", 16])
def test_other_types(dtype):
    options = make_options()
    with pytest.raises(UsageTypeError, match=r"in torch.float32 or torch.float16, got"):
        options.Training.gradientAccumulationDtype(dtype)
    options.Training.gradientAccumulationDtype(lambda p: dtype)
    with pytest.raises(UsageTypeError, match=r"in torch.float32 or torch.float16, got"):
        trained(options)


def test_combined_accumulators_have_none_of_their_own():
    options = make_options()
    options.Training.gradientAccumulationDtype(HALF)
    with pytest.raises(Error, match="use_combined_accum adds them to its velocities"):
        trained(
            options,
            lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.9, use_combined_accum=True),
        )
