"""The memory of a program: close to what is alive at once, and no more when it repeats."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import OutputMode
from popsim_torch.passes import pipeline
from popsim_torch.passes.group_updates import group_updates
from tests.options import make_options

ALIGNMENT = 64  # bytes


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Run stages on one thread: threads of their own keep one micro-batch more between them."""
    monkeypatch.setenv("POPSIM_STAGE_THREADS", "1")


def infer(net, *inputs, options=None):
    model = poptorch.inferenceModel(net, options or make_options())
    model.compile(*inputs)
    return model.compiled.executable.plan


def train(net, *inputs, options=None, kind=poptorch.optim.SGD):
    optimizer = kind(net.parameters(), lr=0.1)
    model = poptorch.trainingModel(net, options or make_options(), optimizer)
    model.compile(*inputs)
    return model.compiled.executable.plan


def align(count):
    return -(-count // ALIGNMENT) * ALIGNMENT


class Classifier(nn.Module):
    """A body with a loss after it."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y):
        out = self.body(x).flatten(1)
        return out, self.loss(out, y)


def mlp(depth=3, width=32):
    layers = [nn.Linear(16, width), nn.ReLU()]
    for _ in range(depth - 2):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return Classifier(nn.Sequential(*layers, nn.Linear(width, 10)))


def cnn():
    return Classifier(
        nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(64, 10),
        )
    )


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x


def transformer():
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
    return Classifier(nn.Sequential(layer, nn.Flatten(), nn.Linear(80, 10)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTM(16, 16, batch_first=True)

    def forward(self, x):
        return self.cell(x)[0][:, -1]


BATCH = 8
CASES = {
    "mlp": (mlp, (BATCH, 16)),
    "deep mlp": (lambda: mlp(12), (BATCH, 16)),
    "cnn": (cnn, (BATCH, 1, 12, 12)),
    "residual": (lambda: Classifier(Residual()), (BATCH, 16)),
    "transformer": (transformer, (BATCH, 5, 16)),
    "lstm": (lambda: Classifier(Recurrent()), (BATCH, 5, 16)),
}


def make_case(name, d=1, ga=1):
    make, shape = CASES[name]
    torch.manual_seed(0)
    count = d * ga * BATCH
    inputs = torch.randn(count, *shape[1:]), torch.randint(0, 10, (count,))
    return make(), inputs, make_options(d, ga)


@pytest.mark.parametrize("name", CASES)
def test_the_arena_of_training_is_close_to_the_peak(name):
    net, inputs, options = make_case(name)
    program = train(net, *inputs, options=options)
    assert 0 < program.peak_live_bytes <= program.arena_bytes
    assert program.arena_bytes <= 1.1 * program.peak_live_bytes


@pytest.mark.parametrize("name", CASES)
def test_the_arena_of_inference_is_close_to_the_peak(name):
    net, inputs, options = make_case(name)
    program = infer(net.eval(), *inputs, options=options)
    assert 0 < program.peak_live_bytes <= program.arena_bytes
    assert program.arena_bytes <= 1.1 * program.peak_live_bytes


@pytest.mark.parametrize("name", CASES)
def test_repeating_takes_no_more_arena(name):
    sizes = []
    for counts in ((1, 2), (3, 4)):  # both with gradient accumulation
        net, inputs, options = make_case(name, *counts)
        program = train(net, *inputs, options=options)
        sizes.append((program.arena_bytes, program.persistent_bytes))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("d", [2, 16])
def test_device_iterations_of_inference_take_no_more(d):
    sizes = []
    for count in (1, d):
        net, inputs, options = make_case("mlp", count)
        sizes.append(infer(net, *inputs, options=options).arena_bytes)
    assert sizes[0] == sizes[1]


def test_inference_needs_no_more_for_more_layers():
    x = torch.randn(BATCH, 16)
    y = torch.zeros(BATCH, dtype=torch.long)
    assert infer(mlp(4), x, y).arena_bytes == infer(mlp(24), x, y).arena_bytes


def test_training_keeps_the_activations_of_every_layer():
    """One activation per layer: the input of a ReLU is overwritten."""
    batch, width = 512, 16
    x, y = torch.randn(batch, 16), torch.zeros(batch, dtype=torch.long)
    shallow, deep = (train(mlp(depth, width), x, y) for depth in (4, 24))
    activations = 20 * batch * width * 4
    more = deep.arena_bytes - shallow.arena_bytes
    assert activations <= more <= 1.1 * activations


def test_gradients_of_weights_wait_for_the_update():
    x, y = torch.randn(1, 16), torch.zeros(1, dtype=torch.long)
    adam = poptorch.optim.Adam
    shallow, deep = (train(mlp(depth, 64), x, y, kind=adam) for depth in (4, 24))
    gradients = 20 * (64 * 64 + 64) * 4
    more = deep.arena_bytes - shallow.arena_bytes
    assert gradients <= more <= 1.1 * gradients


def test_gradients_that_plain_sgd_takes_from_a_small_batch_do_not_exist():
    x, y = torch.randn(1, 16), torch.zeros(1, dtype=torch.long)
    shallow, deep = (train(mlp(depth, 64), x, y) for depth in (4, 24))
    of_biases_and_rows = 20 * 3 * 64 * 4
    assert deep.arena_bytes - shallow.arena_bytes <= of_biases_and_rows


@pytest.mark.parametrize("name", CASES)
def test_updating_all_weights_at_once_takes_no_more(name, monkeypatch):
    sizes = []
    for passes in (
        pipeline.HOST_PASSES,
        [p for p in pipeline.HOST_PASSES if p is not group_updates],
    ):
        monkeypatch.setattr(pipeline, "HOST_PASSES", passes)
        net, inputs, options = make_case(name)
        program = train(net, *inputs, options=options, kind=poptorch.optim.Adam)
        sizes.append((program.arena_bytes, program.peak_live_bytes, program.persistent_bytes))
    assert sizes[0] == sizes[1]


def test_accumulated_gradients_do_not_wait():
    x, y = torch.randn(2, 16), torch.zeros(2, dtype=torch.long)
    options = [make_options(1, 2) for _ in range(2)]
    shallow, deep = (
        train(mlp(depth, 64), x, y, options=o) for depth, o in zip((4, 24), options, strict=True)
    )
    gradient = (64 * 64 + 64) * 4
    assert deep.arena_bytes - shallow.arena_bytes <= 2 * gradient


@pytest.mark.parametrize("name", ["mlp", "cnn", "residual"])
def test_inference_takes_less_than_training(name):
    net, inputs, _ = make_case(name)
    assert infer(net.eval(), *inputs).arena_bytes < train(net.train(), *inputs).arena_bytes


def test_the_bytes_of_a_plain_chain():
    """Two matrix products in a row: the second one's input and result are alive together."""

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.ones(16, 32))
            self.b = nn.Parameter(torch.ones(32, 64))

        def forward(self, x):
            return (x @ self.a) @ self.b

    program = infer(Chain(), torch.ones(4, 16))
    assert program.peak_live_bytes == 4 * 32 * 4 + 4 * 64 * 4
    assert program.arena_bytes == program.peak_live_bytes
    assert program.persistent_bytes == (16 * 32 + 32 * 64) * 4


def test_weights_are_persistent():
    net = mlp()
    x, y = torch.randn(BATCH, 16), torch.zeros(BATCH, dtype=torch.long)
    weights = sum(align(p.numel() * 4) for p in net.parameters())
    assert infer(net, x, y).persistent_bytes >= weights
    assert infer(net, x, y).persistent_bytes <= weights + 20 * ALIGNMENT


def test_optimizer_state_is_persistent():
    x, y = torch.randn(BATCH, 16), torch.zeros(BATCH, dtype=torch.long)
    net = mlp()
    weights = sum(align(p.numel() * 4) for p in net.parameters())
    plain = train(net, x, y).persistent_bytes
    adam = train(mlp(), x, y, kind=poptorch.optim.Adam).persistent_bytes
    extra = adam - plain - 2 * weights
    assert 0 <= extra + 10 * ALIGNMENT <= 60 * ALIGNMENT


def test_accumulators_are_persistent():
    net = mlp()
    weights = sum(align(p.numel() * 4) for p in net.parameters())
    y = torch.zeros(2 * BATCH, dtype=torch.long)
    x = torch.randn(2 * BATCH, 16)
    with_accumulation = train(net, x, y, options=make_options(1, 2)).persistent_bytes
    plain = train(mlp(), x[:BATCH], y[:BATCH]).persistent_bytes
    assert with_accumulation == plain + weights


def test_half_takes_half():
    x = torch.randn(64, 256)
    net = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    single, half = infer(net, x), infer(net.half(), x.half())
    assert half.arena_bytes <= single.arena_bytes // 2
    assert half.persistent_bytes <= single.persistent_bytes // 2 + 2 * ALIGNMENT


def test_views_take_nothing():
    class Views(nn.Module):
        def forward(self, x):
            x = torch.cumsum(x, 1)
            return x.view(-1).view(4, 8, 8).transpose(1, 2)[:, 1:].unsqueeze(0)

    program = infer(Views(), torch.ones(4, 64))
    assert program.arena_bytes == 4 * 64 * 4


@pytest.mark.parametrize("mode", [OutputMode.All, OutputMode.Final, OutputMode.Sum])
def test_outputs_are_not_in_the_arena(mode):
    sizes = set()
    for d in (1, 8):
        net, inputs, options = make_case("mlp", d)
        options.outputMode(mode)
        sizes.add(infer(net, *inputs, options=options).arena_bytes)
    assert len(sizes) == 1


def test_an_anchor_that_is_alive_anyway_is_free():
    sizes = []
    for anchored in (False, True):
        net, inputs, options = make_case("mlp")
        if anchored:
            options.anchorTensor("it", "body/0/Gemm:0", OutputMode.All)
        sizes.append(infer(net, *inputs, options=options).arena_bytes)
    assert sizes[1] <= sizes[0] + align(BATCH * 32 * 4)


class Staged(nn.Module):
    """Four layers, one per stage when blocks are on."""

    def __init__(self, ipus):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self._ipus = ipus

    def forward(self, x):
        for layer, ipu in zip(self.layers, self._ipus, strict=True):
            poptorch.Block.start(ipu_id=ipu)
            x = torch.tanh(layer(x))
        return x, poptorch.identity_loss(x, "sum")


def test_a_pipeline_stashes_what_is_in_flight():
    x = torch.randn(16 * BATCH, 16)
    whole = train(Staged([0, 0, 0, 0]), x, options=make_options(1, 16))
    pipeline = train(Staged([0, 1, 2, 3]), x, options=make_options(1, 16))
    activation = BATCH * 16 * 4
    assert pipeline.arena_bytes > whole.arena_bytes
    assert pipeline.arena_bytes <= whole.arena_bytes + (7 + 5 + 3 + 1) * 3 * activation
    assert pipeline.arena_bytes <= 1.1 * pipeline.peak_live_bytes
    assert pipeline.persistent_bytes == whole.persistent_bytes


class DeepStages(nn.Module):
    """Eight layers on each of four stages, or on one; a checkpoint after every eight layers."""

    DEPTH, WIDTH = 8, 32

    def __init__(self, ipus, checkpoint):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(self.WIDTH, self.WIDTH) for _ in range(32))
        self._ipus, self._checkpoint = ipus, checkpoint

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            poptorch.Block.start(ipu_id=self._ipus[number // self.DEPTH])
            x = torch.tanh(layer(x))
            if self._checkpoint and number % self.DEPTH == self.DEPTH - 1:
                x = poptorch.recomputationCheckpoint(x)
        return x, poptorch.identity_loss(x, "sum")


def with_recomputation(mode, ga):
    options = make_options(1, ga)
    options._Popart.set("autoRecomputation", mode)
    return options


def deep_stages(mode, ipus=(0, 1, 2, 3), *, checkpoint=False):
    """Return the size of the arena of ``DeepStages``, in results of a layer."""
    batch, ga = 128, 7
    x = torch.randn(ga * batch, DeepStages.WIDTH)
    program = train(DeepStages(ipus, checkpoint), x, options=with_recomputation(mode, ga))
    assert program.arena_bytes <= 1.1 * program.peak_live_bytes
    return program.arena_bytes / (batch * DeepStages.WIDTH * 4)


OTHERS = 5  # gradients, and values written while their input is read, in results of a layer


def test_a_pipeline_without_recomputation_stashes_every_activation():
    """Stages before the last one stash for 6, 4 and 2 micro-batches; the last one, nothing."""
    activations = (6 + 4 + 2 + 1) * DeepStages.DEPTH
    assert activations <= deep_stages(0) <= activations + OTHERS


@pytest.mark.parametrize("mode", [3, 4])
def test_a_pipeline_with_recomputation_stashes_the_inputs_of_stages(mode):
    """Stages 1, 2, 3 stash for 5, 3, 1 micro-batches; one stage is recomputed at a time."""
    activations = 5 + 3 + 1 + DeepStages.DEPTH
    assert activations <= deep_stages(mode) <= activations + OTHERS


def test_recomputation_makes_a_deep_pipeline_several_times_smaller():
    assert 5 * deep_stages(3) <= deep_stages(0)


@pytest.mark.parametrize("mode", [3, 4])
def test_checkpoints_are_kept_and_one_segment_between_them_is_rebuilt_at_a_time(mode):
    whole = (0, 0, 0, 0)
    assert deep_stages(0, whole) >= 4 * DeepStages.DEPTH
    activations = 3 + DeepStages.DEPTH
    assert deep_stages(mode, whole, checkpoint=True) <= activations + OTHERS


def transformer_in_stages(mode):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(4)
            )

        def forward(self, x):
            for number, layer in enumerate(self.layers):
                poptorch.Block.start(ipu_id=number // 2)
                x = layer(x)
            return x, poptorch.identity_loss(x.mean(1), "sum")

    return train(Net(), torch.randn(12, 16, 32), options=with_recomputation(mode, 3)).arena_bytes


def test_recomputation_makes_a_transformer_in_two_stages_smaller():
    none, standard, norms, pipeline, everything = map(transformer_in_stages, range(5))
    assert pipeline <= 0.4 * none
    assert standard <= 0.8 * none
    assert pipeline < everything < standard < norms < none


def test_more_micro_batches_do_not_make_a_pipeline_larger():
    sizes = []
    for ga in (7, 8, 32):
        x = torch.randn(ga * BATCH, 16)
        sizes.append(train(Staged([0, 1, 2, 3]), x, options=make_options(1, ga)).arena_bytes)
    assert len(set(sizes)) == 1


def test_sharding_takes_no_more_than_the_whole_model():
    x = torch.randn(4 * BATCH, 16)
    options = make_options(1, 4)
    options.setExecutionStrategy(poptorch.ShardedExecution())
    whole = train(Staged([0, 0, 0, 0]), x, options=make_options(1, 4))
    assert train(Staged([0, 1, 2, 3]), x, options=options).arena_bytes <= whole.arena_bytes


def test_a_model_without_ops():
    class Nothing(nn.Module):
        def forward(self, x):
            return x

    program = infer(Nothing(), torch.ones(4))
    assert (program.arena_bytes, program.peak_live_bytes, program.persistent_bytes) == (0, 0, 0)
