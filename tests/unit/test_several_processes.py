"""Environment variables of launchers of several processes, and their effects."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.errors import Error
from popsim_torch.options import Options

LAUNCHERS = {
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "torchrun": ("RANK", "WORLD_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for names in [*LAUNCHERS.values(), ("MASTER_ADDR", "MASTER_PORT")]:
        for name in names:
            monkeypatch.delenv(name, raising=False)


@pytest.fixture
def launch(monkeypatch):
    def set_variables(launcher, rank, size):
        for name, value in zip(LAUNCHERS[launcher], (rank, size), strict=True):
            if value is not None:
                monkeypatch.setenv(name, str(value))

    return set_variables


def processes():
    distributed = Options().Distributed
    return distributed.processId, distributed.numProcesses


def train(options=None):
    model = nn.Sequential(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [(torch.ones(1, 2), torch.ones(1, 1))] * 2
    loss = nn.MSELoss()
    poptorch.fit(model, data, loss=loss, optimizer=optimizer, options=options, verbose=0)


def wrap(options=None):
    poptorch.trainingModel(nn.Linear(2, 1), options)


def infer(options=None):
    poptorch.inferenceModel(nn.Linear(2, 1), options)


def repeat(options=None):
    @poptorch.function(options=options)
    def double():
        return poptorch.repeat(2, lambda x: x * 2, inputs=torch.ones(2))

    assert double().tolist() == [4, 4]


USES = [train, wrap, infer, repeat]


def test_training_needs_a_place_to_meet(launch):
    launch("torchrun", 1, 2)
    message = (
        r"Options.Distributed: process 1 of 2 does not know where to meet the others: MASTER_ADDR "
        r"and MASTER_PORT are not set. Start the program with torchrun: torchrun --nproc-per-node 2"
    )
    with pytest.raises(Error, match=message):
        train()
    model = nn.Linear(2, 1)
    training = poptorch.trainingModel(_WithLoss(model))
    with pytest.raises(Error, match=message):
        training(torch.ones(1, 2))
    with pytest.raises(Error, match=message):  # it is not on the device, and can be called again
        training(torch.ones(1, 2))
    options = Options()
    options.Distributed.disable()
    train(options)


class _WithLoss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return poptorch.identity_loss(self.model(x), "sum")


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_half_a_place_to_meet(launch, monkeypatch, missing):
    launch("torchrun", 0, 2)
    present = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    monkeypatch.setenv(missing, "")
    for name in present.keys() - {missing}:
        monkeypatch.setenv(name, present[name])
    with pytest.raises(Error, match=rf"where to meet the others: {missing} is not set"):
        train()


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("use", [wrap, infer, repeat])
def test_what_updates_no_weights_needs_no_other_process(launch, launcher, use):
    launch(launcher, 1, 2)
    assert processes() == (1, 2)
    use()


def test_offline_compilation_needs_no_other_process(launch, tmp_path):
    launch("torchrun", 1, 2)
    options = Options().connectionType(poptorch.ConnectionType.Never)
    training = poptorch.trainingModel(_WithLoss(nn.Linear(2, 1)), options)
    training.compileAndExport(tmp_path / "model", torch.ones(1, 2))
    (update,) = [op for op in training.compiled.program.graph.ops if op.kind == "all_reduce"]
    assert len(update.inputs) == 2


def test_a_program_for_another_number_of_processes(launch, tmp_path):
    options = Options().connectionType(poptorch.ConnectionType.Never)
    options.Distributed.configureProcessId(0, 3)
    model = nn.Linear(2, 1)
    poptorch.trainingModel(_WithLoss(model), options).compileAndExport(
        tmp_path / "model", torch.ones(1, 2)
    )
    with pytest.raises(Error, match=r"compiled to train in 3 replicas.*nproc-per-node 3"):
        poptorch.load(tmp_path / "model")
    launch("torchrun", 0, 2)
    with pytest.raises(Error, match=r"compiled to train in 3 replicas.* have 2, in 2 processes"):
        poptorch.load(tmp_path / "model")
    never = poptorch.ConnectionType.Never
    loaded = poptorch.load(tmp_path / "model", lambda options: options.connectionType(never))
    assert torch.equal(loaded.state_dict()["model.weight"], model.weight)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e9])
def test_times_that_nobody_can_wait(seconds):
    with pytest.raises(ValueError, match=r"setTimeout\(.*need 0 < seconds"):
        Options().Distributed.setTimeout(seconds)
    with pytest.raises(AssertionError, match="pass a number of seconds"):
        Options().Distributed.setTimeout("60")


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("use", USES)
def test_one_process_passes(launch, launcher, use):
    launch(launcher, 0, 1)
    assert processes() == (0, 1)
    use()


@pytest.mark.parametrize(
    "values", [(0, None), (None, 4), ("gold", 4), (1, "many"), (4, 4), ("-1", 4), (0, 0), ("²", 4)]
)
@pytest.mark.parametrize("launcher", ["torchrun", "mpiexec", "srun"])
def test_what_no_launcher_sets_is_left_alone(launch, launcher, values):
    launch(launcher, *values)
    assert processes() == (0, 1)


def test_a_batch_script_is_one_process(monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert processes() == (0, 1)
    wrap()


def test_which_launcher_counts(launch):
    launch("srun", 1, 2)
    launch("torchrun", 5, 8)
    assert processes() == (5, 8)
    launch("mpirun", 0, 1)  # one process, which has started torchrun
    assert processes() == (5, 8)
    launch("mpirun", 2, 4)
    assert processes() == (2, 4)


def test_loaders_take_the_part_of_their_process(launch):
    """Loaders have no weights, so nothing must be kept equal."""
    launch("torchrun", 1, 2)
    loader = poptorch.DataLoader(Options(), torch.arange(8), batch_size=2)
    assert torch.cat(list(loader)).tolist() == [4, 5, 6, 7]
    options = Options()
    options.Distributed.disable()
    assert len(list(poptorch.DataLoader(options, torch.arange(8), batch_size=2))) == 4
