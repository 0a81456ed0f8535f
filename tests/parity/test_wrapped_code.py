"""What wraps a model's code without changing its values: checkpoints, compilers, devices."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import popsim_torch as poptorch
from popsim_torch.enums import OutputMode
from tests.parity.compare import Pair, quiet_options
from tests.parity.functions import compare_with_eager, in_both
from tests.parity.tolerances import TRAINED

TOLERANCE = TRAINED[torch.float32]


class Blocks(nn.Module):
    """Layers that ``wrap`` calls."""

    def __init__(self, wrap):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(3)
        )
        self.last = nn.Linear(8, 3)
        self._wrap = wrap

    def forward(self, x, y):
        x = self.first(x)
        for block in self.blocks:
            x = self._wrap(block, x)
        out = self.last(x)
        return out, F.cross_entropy(out, y)


def train(model):
    pair = Pair(
        model, lambda module: torch.optim.SGD(module.parameters(), lr=0.1), tolerance=TOLERANCE
    )
    for _ in range(3):
        pair.step(torch.randn(6, 4), torch.randint(0, 3, (6,)))
    return pair


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    train(Blocks(lambda block, x: checkpoint(block, x, use_reentrant=reentrant)))


def test_checkpoint_of_keywords_and_tuples():
    def wrap(block, x):
        return checkpoint(
            lambda a, *, scale: (scale * block(a), a), x, scale=2.0, use_reentrant=False
        )[0]

    train(Blocks(wrap))


def test_checkpoint_sequential():
    train(Blocks(lambda block, x: checkpoint_sequential(block, 2, x, use_reentrant=False)))


def test_reentrant_checkpoint_without_a_gradient_to_hand_on():
    """PyTorch gives the function's own weights no gradient then."""
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        compare_with_eager(lambda model, x: checkpoint(model.fc, x, use_reentrant=True), "training")


# In eager PyTorch, that is.
where_the_compiler_runs = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore:Guards may run slower on Python 3.13.0",  # PyTorch, of itself
)


@where_the_compiler_runs
def test_compiled_layers():
    pair = train(Blocks(lambda block, x: torch.compile(block, backend="eager")(x)))
    names = pair.device.getTensorNames()
    assert "blocks/0/0/Gemm:0" in names


@torch.compile(backend="eager")
def compiled(x):
    return torch.relu(x) * 2 + x.sum()


@where_the_compiler_runs
@in_both({"function": lambda model, x: compiled(model.fc(x))})
def test_compiled_function(function, kind):
    compare_with_eager(function, kind)


def test_the_compiler_is_back_afterwards():
    runs = []

    def backend(graph_module, inputs):
        runs.append(graph_module)
        return graph_module.forward

    function = torch.compile(lambda x: x.sin() + 1, backend=backend)
    compare_with_eager(lambda model, x: function(x), "inference")
    before = len(runs)
    torch._dynamo.reset()
    function(torch.ones(3))
    assert len(runs) == before + 1


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_a_compiled_module_is_the_model(training):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x, y):
            out = self.fc(x)
            return out, F.cross_entropy(out, y)

        def __bool__(self):
            raise AssertionError("nobody asks whether a model is true")

    net = Model()
    expected = net(torch.ones(2, 4), torch.tensor([0, 2]))[0]
    compiled = torch.compile(net, backend="eager")  # (its len() is that of the module)
    model = poptorch.trainingModel(compiled) if training else poptorch.inferenceModel(compiled)
    out, _ = model(torch.ones(2, 4), torch.tensor([0, 2]))
    assert torch.allclose(out, expected, atol=1e-6)


class OnTheHost(nn.Module):
    """Makes tensors in many ways; its own were made on the CPU."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.table = torch.arange(3.0)

    def forward(self, x, y):
        out = self.norm(self.fc(x)) + torch.ones(3) + torch.tensor([1.0, 2, 3]) + self.table
        if torch.tensor(1.0) > 0:
            out = out + torch.full((3,), torch.tensor(2.0)) + F.one_hot(y, 3)
        return out[:, torch.tensor([True, False, True])], F.cross_entropy(out, y)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, poptorch.optim.LAMB])
def test_default_device_without_memory(make):
    """What this package makes for itself lies in the host's memory, whatever the default is."""
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))

    def run():
        torch.manual_seed(7)
        model = OnTheHost()
        with torch.device(default):
            optimizer = make(model.parameters(), lr=0.1)
            options = quiet_options()
            options.outputMode(OutputMode.All)
            device = poptorch.trainingModel(model, options, optimizer)
            device(x, y)
            optimizer.param_groups[0]["lr"] = 0.2
            device.setOptimizer(optimizer)
            results = device(x, y)
            device.destroy()
        return *results, *model.state_dict().values()

    default = "meta"
    ours = run()
    default = "cpu"
    for tensor, expected in zip(ours, run(), strict=True):
        assert torch.equal(tensor, expected)
