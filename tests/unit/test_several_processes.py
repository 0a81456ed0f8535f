"""Environment variables of launchers of several processes, and their effects."""

import os
import subprocess
import sys

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
    for names in LAUNCHERS.values():
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


TWO_RANKS = ["--standalone", "--nproc-per-node=2"]
USES = [train, wrap, infer, repeat]


def test_what_is_loaded_is_refused_too(launch, tmp_path):
    model, x = nn.Linear(2, 1), torch.ones(1, 2)
    poptorch.inferenceModel(model).compileAndExport(tmp_path / "model", x)
    launch("torchrun", 1, 2)
    with pytest.raises(Error, match=r"Options.Distributed \(RANK=1, WORLD_SIZE=2\): .*disable\(\)"):
        poptorch.load(tmp_path / "model")
    loaded = poptorch.load(tmp_path / "model", lambda options: options.Distributed.disable())
    torch.testing.assert_close(loaded(x), model(x).detach())


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("use", USES)
def test_several_processes_are_refused(launch, launcher, use):
    launch(launcher, 1, 2)
    assert processes() == (1, 2)
    rank, size = LAUNCHERS[launcher]
    message = (
        rf"Options.Distributed \({rank}=1, {size}=2\): a program of several processes is not "
        r"supported .* Start one process, without the launcher; or call "
        r"options\.Distributed\.disable\(\) if each process is to work by itself"
    )
    with pytest.raises(Error, match=message):
        use()
    options = Options()
    options.Distributed.disable()
    use(options)


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


@pytest.mark.parametrize("use", [train, repeat])
def test_several_replicas_are_refused_in_loops_too(use):
    with pytest.raises(Error, match=r"Options.replicationFactor\(2\): replication is not"):
        use(Options().replicationFactor(2))


def test_torchrun(tmp_path):
    """The ranks end with this message."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, popsim_torch as poptorch\n"
        "try:\n"
        "    poptorch.trainingModel(torch.nn.Linear(2, 1))\n"
        "except poptorch.Error as error:\n"
        "    print('refused:', str(error).split(':')[1].strip())\n"
    )
    run = subprocess.run(
        [*(sys.executable, "-m", "torch.distributed.run"), *TWO_RANKS, str(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = [line for line in run.stdout.splitlines() if "refused" in line]
    assert sorted(line[line.index("refused") :] for line in lines) == [
        f"refused: Options.Distributed (RANK={rank}, WORLD_SIZE=2)" for rank in range(2)
    ]
