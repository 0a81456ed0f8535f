"""Recomputation changes no bit, takes less memory, and can be watched."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import OutputMode
from popsim_torch.ir import Phase
from tests.options import make_options as some_options
from tests.sweeps import combined, one_by_one

MICRO_BATCH = 4
MODES = [1, 2, 3, 4]  # autoRecomputation
PIPELINED = [("pipelined", mode) for mode in MODES]


class Parts(nn.Module):
    """Modules in a row, each on a stage of its own if blocks are on."""

    def __init__(self, parts, *, staged=False, checkpoint=False):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.loss = nn.CrossEntropyLoss()
        self._staged, self._checkpoint = staged, checkpoint

    def forward(self, x, y):
        for number, part in enumerate(self.parts):
            if self._staged:
                poptorch.Block.start(ipu_id=number)
            x = part(x)
            if self._checkpoint:
                x = poptorch.recomputationCheckpoint(x)
        return x, self.loss(x, y)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + nn.functional.dropout(nn.functional.gelu(self.fc(self.norm(x))), 0.25)


class LastStep(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Counting(nn.Module):
    """A buffer that forward reads and changes."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x):
        x = torch.tanh(self.fc(x)) * self.scale.clone()
        self.scale.mul_(0.75)
        return torch.tanh(x)


class Noisy(nn.Module):
    """Random numbers of an op of the device's own, and of one of PyTorch's."""

    def forward(self, x):
        x = x * torch.randn_like(x) + torch.rand(x.shape)
        return x * torch.sin(x * torch.randint(1, 3, x.shape))


def mlp():
    return [
        nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()),
        nn.Sequential(Residual(6), Residual(6)),
        Counting(),
        nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 3)),
    ]


def cnn():
    return [
        nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU()),
        nn.Sequential(nn.Conv2d(8, 4, 1), nn.AvgPool2d(2), nn.Dropout2d(0.5)),
        nn.Sequential(nn.Flatten(), nn.LazyLinear(3)),
    ]


def transformer():
    def layer(norm_first):
        return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)

    return [
        nn.Embedding(7, 8),
        layer(True),
        layer(False),
        nn.Sequential(nn.Flatten(), nn.Linear(40, 3)),
    ]


class Taking(nn.Module):
    """The sequence out of what a recurrent layer returns."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


def lstm():
    return [
        Taking(nn.LSTM(4, 6, batch_first=True)),
        Taking(nn.GRU(6, 6, batch_first=True)),
        nn.Tanh(),
        LastStep(),
    ]


def noisy():
    return [nn.Linear(6, 6), nn.Sequential(Noisy(), nn.Linear(6, 6)), Noisy(), nn.Linear(6, 3)]


def shared():
    """The same layer on two stages."""
    layer = nn.Linear(6, 6)
    act = nn.GELU()
    return [nn.Sequential(layer, act), nn.Sequential(layer, act), nn.Linear(6, 6), nn.Linear(6, 3)]


MODELS = {
    "mlp": (mlp, (6,)),
    "cnn": (cnn, (1, 10, 10)),
    "transformer": (transformer, (5,)),
    "lstm": (lstm, (5, 4)),
    "noisy": (noisy, (6,)),
    "shared": (shared, (6,)),
}


def make_options(way, mode, d=1, ga=7):
    options = some_options(d, ga, seed=5)
    options.outputMode(OutputMode.All)
    if way == "sharded":
        options.setExecutionStrategy(poptorch.ShardedExecution())
    if mode is not None:
        options._Popart.set("autoRecomputation", mode)
    return options


def make_batch(name, count):
    shape = MODELS[name][1]
    x = torch.randint(0, 7, (count, *shape)) if name == "transformer" else None
    return (torch.randn(count, *shape) if x is None else x), torch.randint(0, 3, (count,))


def make_net(name, way, dtype, *, checkpoint=False):
    torch.manual_seed(1)
    make, _ = MODELS[name]
    net = Parts(make(), staged=way != "whole", checkpoint=checkpoint)
    net(*make_batch(name, 2))  # lazy layers
    return net.to(dtype)


def train(name, way, mode, dtype=torch.float32, *, d=1, ga=7, checkpoint=False, anchors=()):
    """Return what two calls and the weights after them show, and the executor."""
    net = make_net(name, way, dtype, checkpoint=checkpoint)
    options = make_options(way, mode, d, ga)
    for anchor, anchor_mode in anchors:
        options.anchorTensor(anchor, anchor, anchor_mode)
    optimizer = poptorch.optim.Adam(net.parameters(), lr=0.01)
    model = poptorch.trainingModel(net, options, optimizer)
    torch.manual_seed(2)
    seen = []
    for _ in range(2):
        x, y = make_batch(name, d * ga * MICRO_BATCH)
        seen += model(x.to(dtype) if x.is_floating_point() else x, y)
    seen += [value.clone() for value in net.state_dict().values()]
    return seen, model


def assert_same(ours, theirs):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


@pytest.fixture(scope="module")
def without():
    """Results without recomputation, by what they depend on."""
    known = {}

    def get(name, way, dtype=torch.float32, **counts):
        key = (name, way, dtype, *counts.items())
        if key not in known:
            known[key] = train(name, way, 0, dtype, **counts)[0]
        return known[key]

    return get


def roots(graph, tensor_ids):
    return {graph.root(graph.tensors[i]).id for i in tensor_ids if i >= 0}


def copies(model):
    return [name for name in model.getTensorNames() if name.endswith("__re")]


# All models run with what is on by default, and with the mode that rebuilds most; the model with
# buffers and random numbers in all ways.
WAYS = [("whole", 1), ("whole", 4), *PIPELINED, ("sharded", 3)]
ALL_MODELS = [("whole", 4), ("pipelined", 3)]


@pytest.mark.parametrize(
    ("name", "way_and_mode"),
    combined(MODELS, WAYS, quick=lambda name, way: name == "mlp" or way in ALL_MODELS),
)
def test_it_changes_no_bit(without, name, way_and_mode):
    way, mode = way_and_mode
    seen, model = train(name, way, mode)
    assert all(torch.isfinite(value).all() for value in seen)
    assert_same(seen, without(name, way))
    if mode == 4 or (mode == 3 and way != "whole"):
        assert copies(model)


@pytest.mark.parametrize("way", ["whole", "pipelined"])
@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_change_no_bit(without, name, way):
    seen, model = train(name, way, 3, checkpoint=True)
    assert_same(seen, without(name, way))
    assert copies(model)


@pytest.mark.parametrize(("name", "mode"), one_by_one(["cnn", "mlp", "transformer"], [3, 1]))
def test_it_changes_no_bit_of_float16(without, name, mode):
    seen, _ = train(name, "pipelined", mode, torch.float16)
    assert_same(seen, without(name, "pipelined", torch.float16))


@pytest.mark.parametrize("mode", [1, 4])
@pytest.mark.parametrize("d, ga", [(1, 1), (3, 1), (2, 3)])
def test_it_changes_no_bit_whatever_the_loop(without, d, ga, mode):
    seen, _ = train("mlp", "whole", mode, d=d, ga=ga)
    assert_same(seen, without("mlp", "whole", d=d, ga=ga))


def test_batch_norm_counts_every_batch_once():
    batches = torch.randn(7, MICRO_BATCH, 6)
    norm = nn.BatchNorm1d(6)
    nets = [Parts([nn.Sequential(nn.Tanh(), norm, nn.Linear(6, 3))]) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    for batch in batches:
        nets[0](batch, torch.zeros(MICRO_BATCH, dtype=torch.long))
    expected = norm.running_mean.clone(), norm.running_var.clone()
    norm.reset_running_stats()
    optimizer = poptorch.optim.SGD(nets[1].parameters(), lr=0.0)
    model = poptorch.trainingModel(nets[1], make_options("whole", 4), optimizer)
    model(batches.flatten(0, 1), torch.zeros(7 * MICRO_BATCH, dtype=torch.long))
    assert any("BatchNormalization" in name for name in copies(model))
    torch.testing.assert_close((norm.running_mean, norm.running_var), expected)


# Which mode


@pytest.mark.parametrize("way, mode", [("whole", 0), ("pipelined", 3), ("sharded", 0)])
def test_the_default(way, mode):
    default, chosen = (train("mlp", way, m)[1] for m in (None, mode))
    assert default.getTensorNames() == chosen.getTensorNames()
    assert bool(copies(default)) == (mode != 0)
    programs = [m.program(host=True) for m in (default, chosen)]
    assert programs[0] == programs[1]


def test_a_stage_keeps_its_inputs_only():
    """Backward reads of forward's values what earlier stages made, and on the last stage all."""
    _, model = train("transformer", "pipelined", 3)
    graph = model.compiled.host_program.graph
    stage_of = {}
    read = set()
    for op in graph.ops:
        if op.phase == Phase.FORWARD:
            stage_of |= {root: op.stage for root in roots(graph, op.outputs)}
        if op.phase == Phase.BACKWARD:
            read |= {(stage_of.get(root, 9), op.stage) for root in roots(graph, op.inputs)}
    assert {pair for pair in read if pair[0] <= pair[1]} == {(0, 1), (1, 2), (2, 3), (3, 3)}


def test_inference_rebuilds_nothing():
    net = make_net("mlp", "whole", torch.float32).eval()
    model = poptorch.inferenceModel(net, make_options("whole", 4, ga=1))
    model(*make_batch("mlp", MICRO_BATCH))
    assert not copies(model)


# Checkpoints


class Layers(nn.Module):
    """Four layers; ``mark`` is given the result of the second one."""

    def __init__(self, mark):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self._mark = mark

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number == 1:
                x = self._mark(x)
        return x, poptorch.identity_loss(x, "sum")


def first_of(result):
    return result[0]


MARKS = {
    "one": poptorch.recomputationCheckpoint,
    "several": lambda x: first_of(poptorch.recomputationCheckpoint(x, x * 2)),
    "list": lambda x: first_of(poptorch.recomputationCheckpoint([x])),
    "tuple": lambda x: first_of(poptorch.recomputationCheckpoint((x,))),
    "view": lambda x: poptorch.recomputationCheckpoint(x.view(-1)).view(x.shape),
    "changed in place": lambda x: poptorch.recomputationCheckpoint(x.clone().add_(0)),
}


@pytest.mark.parametrize("mark", MARKS)
def test_a_checkpoint_is_kept(mark):
    model = poptorch.trainingModel(Layers(MARKS[mark]), make_options("whole", 3, ga=1))
    model(torch.randn(MICRO_BATCH, 6))
    names = copies(model)
    assert "layers/0/Gemm:0__re" in names
    assert "Tanh:0__re" in names
    assert not any("layers/2" in name or "layers/3" in name for name in names)
    assert ("Tanh:0/1__re" in names) == (mark == "changed in place")


def test_a_parameter_an_input_and_host_data_are_kept_anyway():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x):
            given = (x, self.fc.weight, data)
            marked = poptorch.recomputationCheckpoint(*given)
            assert [id(tensor) for tensor in marked] == [id(tensor) for tensor in given]
            x = self.fc(x) + data
            return x, poptorch.identity_loss(torch.tanh(x), "sum")

    data = torch.ones(6)
    x = torch.randn(MICRO_BATCH, 6)
    net = Net()
    expected = net.fc(x) + data
    model = poptorch.trainingModel(net, make_options("whole", 4, ga=1))
    torch.testing.assert_close(model(x)[0], expected.detach())
    assert "fc/Gemm:0__re" in copies(model)


def test_a_checkpoint_without_recomputation_changes_nothing():
    programs = []
    for mark in (lambda x: x, poptorch.recomputationCheckpoint):
        model = poptorch.trainingModel(Layers(mark), make_options("whole", 0, ga=1))
        model(torch.randn(MICRO_BATCH, 6))
        programs.append(model.program(host=True))
    assert programs[0] == programs[1]


# Anchors and prints


@pytest.mark.parametrize("anchor_mode", [OutputMode.All, OutputMode.Final, OutputMode.Sum])
@pytest.mark.parametrize("way", ["whole", "pipelined"])
def test_a_copy_can_be_anchored_and_is_what_it_copies(without, way, anchor_mode):
    _, model = train("mlp", way, 4)
    names = copies(model)
    pairs = [(n, n.removesuffix("__re")) for n in names]
    anchors = [(name, anchor_mode) for pair in pairs for name in pair]
    seen, model = train("mlp", way, 4, anchors=anchors)
    assert_same(seen, without("mlp", way))
    assert len(pairs) > 10
    for name, original in pairs:
        copy, value = model.getAnchoredTensor(name), model.getAnchoredTensor(original)
        assert torch.equal(copy, value), name


@pytest.mark.parametrize("way, mode", [("whole", 1), ("whole", 4), *PIPELINED])
def test_anchors_have_no_say_in_what_is_rebuilt(without, way, mode):
    _, plain = train("mlp", way, mode)
    names = [n for n in plain.getTensorNames() if n.startswith("parts/")]
    anchors = [(name, OutputMode.Final) for name in names]
    seen, model = train("mlp", way, mode, anchors=anchors)
    assert_same(seen, without("mlp", way))
    assert model.getTensorNames() == plain.getTensorNames()
    graph = model.compiled.host_program.graph
    for name in copies(model):
        original, copy = (
            graph.root(graph.tensors[graph.names[n]]).id for n in (name.removesuffix("__re"), name)
        )
        stages = {op.stage for op in graph.ops if copy in roots(graph, op.outputs)}
        readers = [op for op in graph.ops if original in roots(graph, op.inputs)]
        assert all(op.phase == Phase.FORWARD or op.stage not in stages for op in readers), name


def test_an_unknown_copy_is_refused():
    expected = "no tensor named 'parts/0/0/Gemm:0__re'.* only for tensors that the backward pass"
    with pytest.raises(poptorch.Error, match=expected):
        train("mlp", "whole", 0, anchors=[("parts/0/0/Gemm:0__re", OutputMode.Final)])


@pytest.mark.parametrize("mode", [0, 3, 4])
def test_prints_come_once(capfd, mode):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            x = poptorch.ipu_print_tensor(torch.tanh(self.fc1(x)), "seen")
            x = poptorch.recomputationCheckpoint(torch.tanh(x * x))
            return poptorch.identity_loss(self.fc2(x), "sum")

    model = poptorch.trainingModel(Net(), make_options("whole", mode, ga=3))
    model(torch.randn(3, 2))
    lines = capfd.readouterr().err
    assert lines.count("seen:") == 3
    assert lines.count("seen_gradient:") == 3
    assert bool(copies(model)) == (mode > 0)
