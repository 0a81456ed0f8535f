"""What a program prints when forward fails: its own lines, and one of this package."""

import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.errors import InternalError
from popsim_torch.executor.tracebacks import shortened, shows_short_tracebacks
from tests.forks import run_forked
from tests.options import make_options

ROOT = Path(__file__).parents[2]

SCRIPT = """
import torch
import {package} as poptorch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(100, 3))

    def scores(self, x):
        return self.body(x)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.scores(x), y)


net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model = poptorch.trainingModel(net, poptorch.Options(), optimizer)
{call}
"""
BATCH = "torch.ones(6, 1, 28, 28), torch.zeros(6).long()"
MISFIT = "mat1 and mat2 shapes cannot be multiplied (6x784 and 100x3)"


def failed(folder, *, call=f"model({BATCH})", **variables):
    """Return the standard error of a script that fails."""
    (folder / "script.py").write_text(SCRIPT.format(package="popsim_torch", call=call))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = run_forked(["script.py"], cwd=folder, env=environment)
    assert done.returncode == 1
    return done.stderr


def frames_of(text):
    """Return the file and function of each frame of a printed traceback, from the script on."""
    found = re.findall(r'File "(.*)", line \d+, in (\S+)', text)
    frames = [(Path(path).name, function) for path, function in found]
    return frames[frames.index(USERS[0]) :]


USERS = [("script.py", "<module>"), ("script.py", "forward"), ("script.py", "scores")]


@pytest.mark.parametrize(
    ("arguments", "package"),
    [([], "popsim_torch"), (["-m", "popsim_torch", "run"], "poptorch")],
    ids=["python", "popsim run"],
)
def test_a_failure_in_forward_shows_the_users_lines_and_one_of_ours(tmp_path, arguments, package):
    (tmp_path / "script.py").write_text(SCRIPT.format(package=package, call=f"model({BATCH})"))
    done = subprocess.run(
        [sys.executable, *arguments, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    text = done.stderr
    assert text.startswith(f'Traceback (most recent call last):\n  File "{tmp_path}')
    assert frames_of(text) == [USERS[0], ("executor.py", "__call__"), *USERS[1:]]
    assert "POPSIM_TRACEBACK=full" in text
    assert text.count(MISFIT) == 1
    assert text.count("Traceback") == 1
    assert "In the layer 'body.1', Linear(" in text
    assert len(text.splitlines()) < 20


def test_all_frames_are_shown_on_request(tmp_path):
    text = failed(tmp_path, POPSIM_TRACEBACK="full")
    frames = frames_of(text)
    assert len(frames) > 20
    assert set(USERS) < set(frames)
    assert ("tracer.py", "_forward") in frames
    assert text.count(MISFIT) == 1


@pytest.mark.parametrize(
    "call",
    [
        f"model.compile({BATCH})",
        f"model.profile({BATCH})",
        f"poptorch.fit(net, [({BATCH})] * 2, optimizer=optimizer, verbose=0)",
    ],
    ids=["compile", "profile", "fit"],
)
def test_other_calls_show_as_little(tmp_path, call):
    text = failed(tmp_path, call=call)
    assert frames_of(text) == [USERS[0], ("tracebacks.py", "call"), *USERS[1:]]
    assert text.count(MISFIT) == 1


class Raises(nn.Module):
    """A model whose forward calls a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def caught_of(function):
    with pytest.raises(Exception) as caught:
        poptorch.inferenceModel(Raises(function), make_options())(torch.ones(2, 3))
    return caught.value


def names_of(error):
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_causes_within_user_code_are_kept():
    def reads(x):
        try:
            return {}["missing"]
        except KeyError as error:
            raise ValueError("no such entry") from error

    error = caught_of(reads)
    assert isinstance(error.__cause__, KeyError)
    assert names_of(error) == ["caught_of", "__call__", "forward", "reads"]


def test_what_came_first_in_user_code_is_kept():
    def reads(x):
        try:
            return {}["missing"]
        except KeyError:
            raise ValueError("no such entry")  # noqa: B904

    error = caught_of(reads)
    assert isinstance(error.__context__, KeyError)
    assert not error.__suppress_context__


def test_what_the_tracer_met_first_is_not_shown():
    error = caught_of(lambda x: torch.unique(x))
    assert error.__suppress_context__
    assert error.__cause__ is None
    assert names_of(error) == ["caught_of", "__call__", "forward", "<lambda>"]


def test_a_failure_on_the_device_is_told_once():
    model = poptorch.inferenceModel(Raises(lambda x: torch.arange(3)[x]), make_options())
    with pytest.raises(poptorch.Error, match="out of") as caught:
        model(torch.full((2,), 7))
    assert caught.value.__cause__ is None
    assert names_of(caught.value)[1:] == ["__call__"]


@pytest.mark.parametrize("error", [InternalError("a bug"), ZeroDivisionError("a bug")], ids=repr)
def test_a_mistake_of_ours_keeps_its_frames(error):
    def run():
        place = str(Path(poptorch.__file__).parent / "passes" / "no_such_pass.py")
        exec(compile("def fails(error):\n    raise error\n", place, "exec"), space := {})
        space["fails"](error)

    run.__code__ = run.__code__.replace(co_filename=poptorch.__file__)
    with pytest.raises(type(error)) as caught:
        shows_short_tracebacks(run)()
    assert "fails" in names_of(caught.value)


def test_a_function_keeps_its_name_and_signature():
    assert poptorch.fit.__name__ == "fit"
    assert poptorch.fit.__doc__.startswith("Train a model")


def test_an_error_that_was_never_raised_stays_as_it_is():
    error = ZeroDivisionError("text")
    assert shortened(error, unless="POPSIM_TRACEBACK=full") is error
    assert error.__traceback__ is None
