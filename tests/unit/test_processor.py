"""The kernels' target is chosen when the package is loaded; a lower one can be chosen."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch import _C

TRAINING = (Path(__file__).parent / "trains_like_eager.py").read_text()


def run_python(code, target, *arguments):
    environment = {k: v for k, v in os.environ.items() if k not in HELD}
    environment["POPSIM_CPU"] = target
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=Path(poptorch.__file__).parents[1],  # Python looks here first, and finds this package
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


HELD = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
ATEN = {"sse4": "DEFAULT", "avx2": "AVX2", "avx512": "AVX512"}


@pytest.mark.parametrize("target", _C.usable_targets())
def test_training_like_eager_under_each_target(target):
    result = run_python(TRAINING, target)
    assert result.returncode == 0, result.stderr
    assert f"target {target} of" in result.stdout
    if target in ATEN:
        assert f"({ATEN[target]})" in result.stdout


SAVING = """
import sys, torch
import popsim_torch as poptorch

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.GELU(), torch.nn.Linear(48, 8))

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net

    def forward(self, x):
        return poptorch.identity_loss(self.net(x).square(), "mean")

model = poptorch.trainingModel(Net(), poptorch.Options(), torch.optim.SGD(net.parameters(), lr=0.1))
x = torch.linspace(-1, 1, 128 * 64).reshape(128, 64)
model(x)
model.save(sys.argv[1])
print(model(x).item())
"""
LOADING = """
import sys, torch
import popsim_torch as poptorch

print(poptorch.load(sys.argv[1])(torch.linspace(-1, 1, 128 * 64).reshape(128, 64)).item())
"""


@pytest.mark.slow
@pytest.mark.skipif(len(_C.usable_targets()) < 2, reason="the processor has one target")
def test_a_file_of_one_target_runs_on_another(tmp_path):
    lowest, *_, highest = _C.usable_targets()
    file = tmp_path / "model.poptorch"
    losses = {}
    for writer, reader in ((highest, lowest), (lowest, highest)):
        saved = run_python(SAVING, writer, file)
        loaded = run_python(LOADING, reader, file)
        assert saved.returncode == loaded.returncode == 0, saved.stderr + loaded.stderr
        losses |= {f"saved by {writer}": saved.stdout, f"loaded by {reader}": loaded.stdout}
    first, *others = (float(loss) for loss in losses.values())
    assert others == pytest.approx([first] * 3, rel=1e-4), losses


def test_an_unknown_target_is_refused():
    result = run_python("import popsim_torch", "avx9")
    assert result.returncode != 0
    message = result.stderr.strip().splitlines()[-1]
    assert "POPSIM_CPU=avx9, which this build does not know" in message
    assert ", ".join(_C.usable_targets()) in message


@pytest.mark.skipif(_C.usable_targets() == _C.built_targets(), reason="it has all that are built")
def test_a_target_that_the_processor_lacks_is_refused():
    missing = next(name for name in _C.built_targets() if name not in _C.usable_targets())
    result = run_python("import popsim_torch", missing)
    assert result.returncode != 0
    assert f"POPSIM_CPU={missing}: the targets that" in result.stderr


def test_pytorch_that_has_chosen_already_is_pointed_out():
    lowest, highest = _C.usable_targets()[0], _C.usable_targets()[-1]
    if ATEN.get(lowest) == ATEN.get(highest, "AVX512"):  # (ATen has no code for the matrix units)
        pytest.skip("there is no lower target of PyTorch's")
    code = "import torch; torch.ones(3).exp(); import popsim_torch"
    result = run_python(code, lowest)
    assert result.returncode == 0
    assert f"Set ATEN_CPU_CAPABILITY={ATEN[lowest].lower()} as well" in result.stderr


def test_the_target_stays_once_kernels_were_asked_for():
    others = [name for name in _C.usable_targets() if name != _C.target()]
    if not others:
        pytest.skip("there is one target")
    assert _C.op_table()
    with pytest.raises(_C.InternalError, match="the kernels are in use already"):
        _C.choose_target(others[0])


def test_build_info_is_one_line():
    info = poptorch.build_info()
    assert info.target == _C.target()
    assert info.usable_targets == tuple(_C.usable_targets())
    assert info.num_threads == torch.get_num_threads()
    text = str(info)
    assert "\n" not in text
    for part in (info.version, info.target, info.torch, info.python):
        assert part in text
