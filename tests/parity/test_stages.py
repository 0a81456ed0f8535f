"""Cutting a model into stages changes no value; only what would not fit is refused."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import OutputMode
from tests.options import make_options as some_options

MICRO_BATCH = 2


def make_options(d=1, ga=1, strategy=None):
    options = some_options(d, ga, seed=7)
    options.outputMode(OutputMode.All)
    if strategy is not None:
        options.setExecutionStrategy(strategy)
    return options


class Body(nn.Module):
    """Three layers; a skip connection and batch norm's state cross or sit in the stages."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 6)
        self.fc2 = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.fc3 = nn.Linear(6, 3)
        self.loss = nn.CrossEntropyLoss()

    def first(self, x):
        return torch.tanh(self.fc1(x))

    def second(self, x):
        return x + torch.relu(self.norm(self.fc2(x)))

    def third(self, x, y):
        out = self.fc3(x)
        return out, self.loss(out, y)


class Whole(Body):
    """The model without any mark."""

    def forward(self, x, y):
        return self.third(self.second(self.first(x)), y)


class InBlocks(Body):
    """The same in ``with`` blocks a, b, c."""

    ipus = (None, None, None)

    def forward(self, x, y):
        with poptorch.Block("a", ipu_id=self.ipus[0]):
            x = self.first(x)
        with poptorch.Block("b", ipu_id=self.ipus[1]):
            x = self.second(x)
        with poptorch.Block("c", ipu_id=self.ipus[2]):
            return self.third(x, y)


class InIpuBlocks(InBlocks):
    """The same on IPUs 0, 1, 3: a stage is an IPU."""

    ipus = (0, 1, 3)


class InIpuBlocksAndBack(InBlocks):
    """The same on IPUs 0, 1, 0, which only stages that run one after another allow."""

    ipus = (0, 1, 0)


class Started(Body):
    """The same with blocks that last until the next one."""

    def forward(self, x, y):
        poptorch.Block.start("a", ipu_id=0)
        x = self.first(x)
        poptorch.Block.start("b", ipu_id=1)
        x = self.second(x)
        poptorch.Block.start("c", ipu_id=2)
        return self.third(x, y)


class Begun(Whole):
    """The same with marked modules."""

    def __init__(self):
        super().__init__()
        poptorch.BeginBlock(self.fc1, "a", ipu_id=0)
        poptorch.BeginBlock(self.fc2, "b", ipu_id=1)
        poptorch.BeginBlock(self.fc3, "c", ipu_id=2)


def three_stages():
    return poptorch.PipelinedExecution(
        poptorch.Stage("a").ipu(0), poptorch.Stage("b").ipu(1), poptorch.Stage("c").ipu(2)
    )


def serial_phases():
    liveness = poptorch.Liveness.OffChipAfterEachPhase
    phases = poptorch.Phase("a").ipus(0), poptorch.Phase("b", "c").ipus(0)
    return poptorch.SerialPhasedExecution(*phases).setTensorsLiveness(liveness)


def parallel_phases():
    stages = [poptorch.Stage(block) for block in "abc"]
    phases = [poptorch.Phase(stage) for stage in stages]
    for ipu, phase in enumerate(phases):
        phase.ipus(ipu)
    return poptorch.ParallelPhasedExecution(*phases).sendTensorsOffChipAfterFwd()


# What is run, and under which strategy.
WAYS = {
    "Block, Stage": (InBlocks, three_stages),
    "Block, block ids": (InBlocks, lambda: poptorch.PipelinedExecution("a", ["b"], "c")),
    "Block, SameAsIpu": (InIpuBlocks, lambda: None),
    "Block, AutoIncrement": (
        InBlocks,
        lambda: poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement),
    ),
    "Block.start": (Started, lambda: None),
    "BeginBlock": (Begun, lambda: None),
    "ShardedExecution": (InIpuBlocks, poptorch.ShardedExecution),
    "ShardedExecution of stages": (InBlocks, lambda: poptorch.ShardedExecution("a", "b", "c")),
    "ShardedExecution and back": (InIpuBlocksAndBack, poptorch.ShardedExecution),
    "SerialPhasedExecution": (InBlocks, serial_phases),
    "ParallelPhasedExecution": (InBlocks, parallel_phases),
}
ANCHORS = (
    "input",
    "fc1/Gemm:0",
    "loss/Nll:0",
    "Gradient___fc1/Gemm:0",
    "Gradient___fc1.weight",
    "Gradient___fc3.bias",
    "UpdatedVar___fc2.weight",
    "Accum___fc2.weight",
    "Accl___fc3.weight",
    "norm.running_mean",
)


def run_training(kind, strategy, d, ga, mode=OutputMode.All):
    """Return everything that two calls and the weights after them show."""
    torch.manual_seed(1)
    net = kind()
    options = make_options(d, ga, strategy)
    options.autoRoundNumIPUs(True)
    for name in ANCHORS:
        options.anchorTensor(name, name, mode)
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.125, momentum=0.5)
    model = poptorch.trainingModel(net, options, optimizer)
    seen = {}
    for call in range(2):
        count = d * ga * MICRO_BATCH
        out, loss = model(torch.randn(count, 4), torch.randint(0, 3, (count,)))
        seen |= {f"out {call}": out, f"loss {call}": loss}
        seen |= {f"{n} {call}": model.getAnchoredTensor(n) for n in ANCHORS}
    seen |= {name: value.clone() for name, value in net.state_dict().items()}
    return seen, model.compiled.executable.actions()


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.fixture(scope="module")
def unpipelined():
    """Results of the model without stages, by D and GA."""
    known = {}

    def get(d, ga):
        if (d, ga) not in known:
            known[d, ga] = run_training(Whole, None, d, ga)[0]
        return known[d, ga]

    return get


# AutoIncrement leaves stage 0 empty: four stages, which five micro-batches do not fill.
TRAINING = [(way, ga) for way in WAYS for ga in (5, 8) if (way, ga) != ("Block, AutoIncrement", 5)]


@pytest.mark.parametrize("way, ga", TRAINING)
def test_training_is_bit_equal_to_the_whole_model(unpipelined, way, ga):
    kind, strategy = WAYS[way]
    seen, _ = run_training(kind, strategy(), 2, ga)
    assert_same(seen, unpipelined(2, ga))


@pytest.mark.parametrize("strategy", [serial_phases, parallel_phases])
def test_phases_need_no_number_of_micro_batches(unpipelined, strategy):
    seen, actions = run_training(InBlocks, strategy(), 1, 2)
    assert_same(seen, unpipelined(1, 2))
    assert actions.split()[0] == "0F0"


@pytest.mark.parametrize("mode", [OutputMode.Final, OutputMode.Sum], ids=lambda m: m.name)
def test_anchors_in_other_modes(mode):
    expected, _ = run_training(Whole, None, 2, 5, mode)
    seen, _ = run_training(Started, None, 2, 5, mode)
    assert_same(seen, expected)


def run_inference(kind, strategy, d):
    """Return what two calls show of an evaluation."""
    torch.manual_seed(1)
    net = kind().eval()
    options = make_options(d, 1, strategy)
    options.autoRoundNumIPUs(True)
    options.anchorTensor("first", "fc1/Gemm:0")
    options.anchorTensor("total", "fc1/Gemm:0", OutputMode.Sum)
    model = poptorch.inferenceModel(net, options)
    seen = {}
    for call in range(2):
        out, loss = model(torch.randn(d * 3, 4), torch.randint(0, 3, (d * 3,)))
        seen |= {f"out {call}": out, f"loss {call}": loss}
        seen |= {f"{n} {call}": model.getAnchoredTensor(n) for n in ("first", "total")}
    return seen


@pytest.fixture(scope="module")
def whole_inference():
    """Results of the model without stages, by D."""
    return {d: run_inference(Whole, None, d) for d in (4, 7)}


@pytest.mark.parametrize("d", [4, 7])
@pytest.mark.parametrize("way", WAYS)
def test_inference_is_bit_equal_to_the_whole_model(whole_inference, way, d):
    kind, strategy = WAYS[way]
    assert_same(run_inference(kind, strategy(), d), whole_inference[d])


def test_dropout_draws_the_same_numbers_in_a_pipeline():
    class Net(nn.Module):
        def __init__(self, marked):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self._marked = marked

        def forward(self, x):
            if self._marked:
                poptorch.Block.start(ipu_id=0)
            x = nn.functional.dropout(self.fc(x), 0.5)
            if self._marked:
                poptorch.Block.start(ipu_id=1)
            x = nn.functional.dropout(x, 0.5)
            return x, poptorch.identity_loss(x, "sum")

    results = []
    for marked in (False, True):
        torch.manual_seed(2)
        net = Net(marked)
        model = poptorch.trainingModel(net, make_options(2, 3))
        x = torch.randn(12, 4)
        results.append([model(x)[0] for _ in range(2)] + [net.fc.weight.detach().clone()])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("strategy", [None, poptorch.ShardedExecution()], ids=["pipe", "shard"])
def test_a_buffer_changed_on_a_late_stage_keeps_up_with_its_micro_batch(strategy):
    class Net(nn.Module):
        def __init__(self, marked):
            super().__init__()
            self.fc1 = nn.Linear(3, 3)
            self.fc2 = nn.Linear(3, 3)
            self.register_buffer("scale", torch.ones(3))
            self._marked = marked

        def forward(self, x):
            for i in range(4):
                if self._marked:
                    poptorch.Block.start(ipu_id=i)
                if i < 3:
                    x = torch.tanh(self.fc1(x))
                    continue
                x = self.fc2(x) * self.scale.clone()
                self.scale.mul_(0.5)
                return x, poptorch.identity_loss(x, "sum")

    results = []
    for marked in (False, True):
        torch.manual_seed(2)
        net = Net(marked)
        options = make_options(2, 8, strategy if marked else None)
        options.anchorTensor("g", "Gradient___fc2.weight")
        model = poptorch.trainingModel(net, options)
        out, loss = model(torch.randn(16, 3))
        state = [net.fc1.weight.detach().clone(), net.scale.clone()]
        results.append([out, loss, model.getAnchoredTensor("g"), *state])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_a_weight_used_on_two_stages_gets_the_gradients_of_both():
    class Net(nn.Module):
        def __init__(self, marked):
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self._marked = marked

        def forward(self, x):
            if self._marked:
                poptorch.Block.start(ipu_id=0)
            x = torch.tanh(self.fc(x))
            if self._marked:
                poptorch.Block.start(ipu_id=1)
            x = self.fc(x)
            return x, poptorch.identity_loss(x, "sum")

    results = []
    for marked in (False, True):
        torch.manual_seed(2)
        net = Net(marked)
        options = make_options(2, 4)
        options.anchorTensor("g", "Gradient___fc.weight")
        model = poptorch.trainingModel(net, options)
        out, _ = model(torch.randn(16, 3))
        results.append((out, model.getAnchoredTensor("g"), net.fc.weight.detach().clone()))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_prints_come_once_per_micro_batch_in_the_order_of_the_schedule(capfd):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor([1]).float())

        def forward(self, x):
            poptorch.Block.start(ipu_id=0)
            x = poptorch.ipu_print_tensor(self.w * x, "a", digits=2)
            poptorch.Block.start(ipu_id=1)
            x = poptorch.ipu_print_tensor(x * 2, "b", digits=2)
            return poptorch.identity_loss(x, "sum")

    net = Net()
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.0)
    model = poptorch.trainingModel(net, make_options(1, 3), optimizer)
    model(torch.tensor([1.0, 2.0, 3.0]))
    gradients = {"1B": "b_gradient: (1.0)", "0B": "a_gradient: (2.0)"}
    expected = []
    for action in model.compiled.executable.actions().split()[:-1]:
        where, micro_batch = action[:2], int(action[2])
        values = {"0F": f"a: ({micro_batch + 1}.0)", "1F": f"b: ({2 * (micro_batch + 1)}.0)"}
        expected.append({**values, **gradients}[where])
    assert capfd.readouterr().err.splitlines() == expected


# The schedule that runs


def test_a_pipelined_training_step():
    _, actions = run_training(InBlocks, poptorch.PipelinedExecution(["a", "b"], "c"), 1, 3)
    assert actions == "0F0 1F0 1B0 0F1 0B0 1F1 1B1 0F2 0B1 1F2 1B2 0B2 U"


def test_a_sharded_training_step():
    _, actions = run_training(InBlocks, poptorch.ShardedExecution("a", "b", "c"), 1, 2)
    assert actions == "0F0 1F0 2F0 2B0 1B0 0B0 0F1 1F1 2F1 2B1 1B1 0B1 U"


def test_a_whole_training_step():
    assert run_training(Whole, None, 3, 2)[1] == "0F0 0B0 0F1 0B1 U"


def test_pipelined_inference_fills_with_device_iterations():
    options = make_options(4)
    options.autoRoundNumIPUs(True)
    model = poptorch.inferenceModel(Started().eval(), options)
    model(torch.randn(4, 4), torch.zeros(4, dtype=torch.long))
    assert model.compiled.executable.actions() == "0F0 1F0 0F1 2F0 1F1 0F2 2F1 1F2 0F3 2F2 1F3 2F3"


def test_neighbouring_blocks_on_one_ipu_are_one_stage():
    class Net(Body):
        def forward(self, x, y):
            poptorch.Block.start("a", ipu_id=0)
            x = self.first(x)
            poptorch.Block.start("b", ipu_id=0)
            x = self.second(x)
            poptorch.Block.start("c", ipu_id=1)
            return self.third(x, y)

    _, actions = run_training(Net, None, 1, 3)
    assert actions == "0F0 1F0 1B0 0F1 0B0 1F1 1B1 0F2 0B1 1F2 1B2 0B2 U"


def test_stages_on_the_same_ipu_do_not_overlap():
    strategy = poptorch.PipelinedExecution(poptorch.Stage("a", "b").ipu(0), poptorch.Stage("c"))
    _, actions = run_training(InBlocks, strategy, 1, 3)
    assert actions.startswith("0F0 1F0 1B0 0F1")


# What is refused


def compile_training(net, options):
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.125)
    model = poptorch.trainingModel(net, options, optimizer)
    count = options.device_iterations * options.Training.gradient_accumulation * MICRO_BATCH
    model.compile(torch.randn(count, 4), torch.randint(0, 3, (count,)))


@pytest.mark.parametrize("ga", [1, 2, 4])
def test_too_few_micro_batches_to_fill_the_pipeline(ga):
    options = make_options(1, ga, three_stages())
    options.autoRoundNumIPUs(True)
    with pytest.raises(poptorch.Error, match=r"pipeline stages \(5\): 3 stages"):
        compile_training(InBlocks(), options)


def test_auto_increment_counts_the_empty_first_stage():
    strategy = poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement)
    with pytest.raises(poptorch.Error, match=r"pipeline stages \(7\): 4 stages"):
        compile_training(InBlocks(), make_options(1, 5, strategy))


def test_too_few_device_iterations_in_inference():
    options = make_options(2, 1, three_stages())
    options.autoRoundNumIPUs(True)
    model = poptorch.inferenceModel(InBlocks().eval(), options)
    with pytest.raises(poptorch.Error, match=r"pipeline stages \(3\)"):
        model(torch.randn(2, 4), torch.zeros(2, dtype=torch.long))


def test_stages_that_decrease_along_the_data():
    class Net(Body):
        def forward(self, x, y):
            poptorch.Block.start("a", ipu_id=1)
            x = self.first(x)
            poptorch.Block.start("b", ipu_id=0)
            return self.third(x, y)

    with pytest.raises(
        poptorch.Error, match=r"stages must not decrease .*'fc3/Gemm:0' .*on stage 0"
    ):
        compile_training(Net(), make_options(1, 9))


def test_an_op_behind_a_closed_block():
    class Net(Body):
        def forward(self, x, y):
            with poptorch.Block("a", ipu_id=0):
                x = self.first(x)
            return self.third(x, y)

    with pytest.raises(poptorch.Error, match="No active Block, all the ops must belong to a Block"):
        compile_training(Net(), make_options(1, 5))


def test_the_outer_block_is_not_restored():
    class Net(Body):
        def forward(self, x, y):
            with poptorch.Block("a", ipu_id=0):
                with poptorch.Block("b", ipu_id=0):
                    x = self.first(x)
                return self.third(x, y)

    with pytest.raises(poptorch.Error, match="No active Block"):
        compile_training(Net(), make_options(1, 5))


def test_a_block_that_no_stage_lists():
    with pytest.raises(AssertionError, match=r"Unknown Block.*c"):
        compile_training(InBlocks(), make_options(1, 5, poptorch.PipelinedExecution("a", "b")))


def test_a_block_without_an_ipu_under_same_as_ipu():
    with pytest.raises(AssertionError, match="SameAsIpu"):
        compile_training(InBlocks(), make_options(1, 5))


def test_three_ipus_without_rounding():
    with pytest.raises(poptorch.Error, match="autoRoundNumIPUs"):
        compile_training(InBlocks(), make_options(1, 5, three_stages()))


def test_every_n_outputs_of_a_pipeline():
    options = make_options(4, 5, poptorch.PipelinedExecution(["a", "b"], "c"))
    options.outputMode(OutputMode.EveryN, 2)
    with pytest.raises(poptorch.Error, match="EVERYN is not valid for pipelined models"):
        compile_training(InBlocks(), options)


def test_every_n_anchors_of_a_pipeline():
    options = make_options(4, 5, poptorch.PipelinedExecution(["a", "b"], "c"))
    options.anchorTensor("it", "fc1/Gemm:0", OutputMode.EveryN, 2)
    with pytest.raises(poptorch.Error, match=r"anchorTensor\('it'\).*EVERYN is not valid"):
        compile_training(InBlocks(), options)


def test_every_n_is_fine_when_sharded():
    options = make_options(4, 5, poptorch.ShardedExecution(["a", "b"], "c"))
    options.anchorTensor("it", "fc1/Gemm:0", OutputMode.EveryN, 2)
    compile_training(InBlocks(), options)


def test_a_refused_model_can_be_compiled_with_other_options():
    net = InBlocks()
    with pytest.raises(poptorch.Error, match="pipeline stages"):
        compile_training(net, make_options(1, 2, poptorch.PipelinedExecution(["a", "b"], "c")))
    if hasattr(net, "destroy"):
        net.destroy()
    compile_training(net, make_options(1, 3, poptorch.PipelinedExecution(["a", "b"], "c")))
