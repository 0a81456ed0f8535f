"""The steps of a compilation, their reports, and the state after a failure."""

import gc

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch.errors import InternalError
from popsim_torch.executor import compile as compile_path
from popsim_torch.executor.compile_log import CompileLog
from popsim_torch.executor.connection import Connection
from popsim_torch.executor.device_state import DeviceState
from popsim_torch.executor.dump import Dump
from popsim_torch.passes import pipeline
from tests.options import make_options
from tests.unit.executor.nets import Net, batch, train

BEHIND_THE_TRACE = ["place_stages", "plan_updates", "read_options"]
STATED = ["functionalise", "name", "lower", *(one.__name__ for one in pipeline.PROGRAM_PASSES)]
FITTED = [*(one.__name__ for one in pipeline.HOST_PASSES), "build"]
BEFORE = ["check_request", "describe_calls", "trace"]


def names(log):
    return [step.name for step in log]


def looped(weight):
    @poptorch.function
    def run():
        return poptorch.repeat(3, lambda x: x * weight, torch.ones(2))

    return run


def test_the_log_has_every_step_in_its_order_and_its_time():
    model = train(Net())
    model.compile(*batch())
    log = model.compile_log()
    assert names(log) == [*BEFORE, *BEHIND_THE_TRACE, *STATED, *FITTED]
    assert all(step.seconds > 0 for step in log)
    assert 0 < log.seconds <= model.compiled.duration.total_seconds()
    (lower,) = (step for step in log if step.name == "lower")
    assert lower.made.endswith(" tensors") and lower.made[0].isdigit()
    table = str(log).splitlines()
    assert len(table) == len(log) + 2
    assert table[0].split() == ["step", "ms", "made"] and table[-1].startswith("all ")


def test_loops_are_compiled_by_the_same_steps():
    run = looped(torch.nn.Parameter(torch.tensor([2.0, 3.0])))
    torch.testing.assert_close(run(), torch.tensor([8.0, 27.0]))
    (program,) = run.programs
    assert names(program.compile_log()) == [*BEFORE, *BEHIND_THE_TRACE, *STATED, *FITTED]


class Rows(torch.nn.Module):
    """A model in which the gradient of ``w`` is put together from the gradients of its rows."""

    def __init__(self, mutates):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(2, 3))
        self.mutates = mutates

    def forward(self, x):
        out = x * self.w[0] * self.w[1]
        if self.mutates:
            out = out.clone().mul_(2)
        return poptorch.identity_loss(out, "sum")


@pytest.mark.parametrize("mutates", [False, True])
def test_a_step_leaves_the_trace_of_an_earlier_one_as_it_is(mutates, monkeypatch):
    seen = []

    def noting(step):
        def run(compilation):
            step(compilation)
            traced = compilation.__dict__.get("traced")
            seen.append(None if traced is None else str(traced.graph_module.graph))

        return run

    monkeypatch.setattr(compile_path, "STEPS", tuple(map(noting, compile_path.STEPS)))
    train(Rows(mutates)).compile(torch.ones(1, 3))
    assert len({graph for graph in seen if graph is not None}) == 1


def test_the_log_tells_of_a_program_that_was_read(tmp_path):
    for _ in range(2):
        model = train(Net(), make_options(seed=1).enableExecutableCaching(str(tmp_path)))
        model.compile(*batch())
    assert names(model.compile_log()) == [
        *(*BEFORE, *BEHIND_THE_TRACE, "read the executable cache"),
        *FITTED,
    ]


def test_no_step_sets_what_another_has_set():
    compilation = compile_path.Compilation(None, CompileLog(Dump(None, "")))
    compilation.num_ipus = 1
    with pytest.raises(InternalError, match="two steps set 'num_ipus'"):
        compilation.num_ipus = 2


def test_the_log_needs_a_compiled_model():
    with pytest.raises(poptorch.Error, match="compile_log: the model has not been compiled"):
        train(Net()).compile_log()


def test_a_loop_that_cannot_be_brought_to_its_device_holds_none(monkeypatch):
    connections = []
    attach = Connection.attach_compiled

    def note(self, num_ipus):
        attach(self, num_ipus)
        connections.append((self, self.attached))

    def fail(self):
        raise OSError("no more memory")

    run = looped(torch.nn.Parameter(torch.tensor([2.0, 3.0])))
    gc.collect()
    with monkeypatch.context() as patch:
        patch.setattr(Connection, "attach_compiled", note)
        patch.setattr(DeviceState, "upload_weights", fail)
        with pytest.raises(OSError, match="no more memory"):
            run()
    ((connection, was_attached),) = connections
    assert was_attached and not connection.attached
    torch.testing.assert_close(run(), torch.tensor([8.0, 27.0]))
