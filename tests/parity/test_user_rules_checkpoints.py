"""Norms in checkpoints: running statistics get a batch as often as in eager PyTorch."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import popsim_torch as poptorch
from tests.options import make_options


class Model(nn.Module):
    def __init__(self, way, reentrant, momentum=0.1, instance=False):
        super().__init__()
        torch.manual_seed(0)
        self.way, self.reentrant = way, reentrant
        self.scale = nn.Parameter(torch.ones(4))
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.norms = nn.ModuleList(nn.BatchNorm1d(6, momentum=momentum) for _ in range(2))
        if instance:
            self.norms[0] = nn.InstanceNorm1d(6, affine=True, track_running_stats=True)

    def first(self, x):
        x = self.a(x)
        if x.dim() == 2 and isinstance(self.norms[0], nn.InstanceNorm1d):
            return self.norms[0](torch.stack([x, x.cos(), x**2], 2))[..., 0].tanh()
        return self.norms[0](x).relu()

    def second(self, x):
        return self.norms[1](self.b(x)).relu() + self.norms[1](x)

    def nested(self, x):
        return self.checkpointed(self.second, self.first(x))

    def checkpointed(self, function, x):
        return checkpoint(function, x, use_reentrant=self.reentrant)

    def forward(self, x, y):
        x = x * self.scale
        match self.way:
            case "two":
                x = self.checkpointed(self.second, self.checkpointed(self.first, x))
            case "nested":
                x = self.checkpointed(self.nested, x)
            case _:
                x = self.second(self.first(x))
        return nn.functional.cross_entropy(self.c(x), y)


def batches():
    torch.manual_seed(1)
    return [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(3)]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def eager(model, micro_batches=1):
    steps = sgd(model)
    for batch in batches():
        steps.zero_grad()
        for x, y in zip(*(part.chunk(micro_batches) for part in batch), strict=True):
            (model(x, y) / micro_batches).backward()
        steps.step()


def assert_alike(model, expected, *, counts=False):
    """Compare everything but counters, which are constants of a program unless it needs them."""
    found, right = (
        {k: v for k, v in one.state_dict().items() if counts or "num_batches" not in k}
        for one in (model, expected)
    )
    torch.testing.assert_close(found, right, atol=3e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"momentum": None}, {"instance": True}], ids=str)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("way", ["one", "two", "nested"])
def test_running_statistics_are_those_of_eager_pytorch(way, reentrant, settings, micro_batches):
    model, expected = (Model(way, reentrant, **settings) for _ in range(2))
    executor = poptorch.trainingModel(model, make_options(ga=micro_batches), sgd(model))
    for batch in batches():
        executor(*batch)
    eager(expected, micro_batches)
    assert_alike(model, expected, counts="momentum" in settings)


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_a_device_loop(reentrant):
    model, expected = (Model("two", reentrant) for _ in range(2))
    optimizer, queue = sgd(model), poptorch.InfeedQueue(batches())

    def body(x, y):
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()

    poptorch.function(lambda: poptorch.repeat(3, body, infeed=queue))()
    eager(expected)
    assert_alike(model, expected)


def test_in_a_pipeline():
    model, expected = (Model("two", False) for _ in range(2))
    model.c = poptorch.BeginBlock(model.c, ipu_id=1)
    executor = poptorch.trainingModel(model, make_options(ga=4), sgd(model))
    for batch in batches():
        executor(*batch)
    eager(expected, 4)
    assert_alike(model, expected)


def test_inference_and_eval_change_nothing():
    model = Model("two", False)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    poptorch.inferenceModel(model.eval(), make_options())(*batches()[0])
    torch.testing.assert_close(dict(model.named_buffers()), before)


def test_a_call_of_the_function_itself():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("variance", torch.ones(3))

        def part(self, x):
            return nn.functional.batch_norm(
                self.fc(x), self.mean, running_var=self.variance, training=True, momentum=0.3
            )

        def forward(self, x, y):
            return nn.functional.cross_entropy(checkpoint(self.part, x, use_reentrant=False), y)

    torch.manual_seed(0)
    model, expected = Functional(), Functional()
    expected.load_state_dict(model.state_dict())
    executor = poptorch.trainingModel(model, make_options(), sgd(model))
    for batch in batches():
        executor(*batch)
    eager(expected)
    assert_alike(model, expected)


@pytest.mark.parametrize("kept", [torch.ops.aten.native_batch_norm, torch.ops.aten.addmm], ids=str)
def test_a_norm_whose_results_a_policy_keeps_does_not_run_again(kept):
    def policy(_, operator, *args, **kwargs):
        return operator is kept.default

    class Selected(Model):
        def checkpointed(self, function, x):
            def contexts():
                return create_selective_checkpoint_contexts(policy)

            return checkpoint(function, x, use_reentrant=False, context_fn=contexts)

    model, expected = (Selected("two", False) for _ in range(2))
    executor = poptorch.trainingModel(model, make_options(), sgd(model))
    for batch in batches():
        executor(*batch)
    eager(expected)
    assert_alike(model, expected)
