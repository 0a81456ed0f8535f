"""Whole programs: what runs on the device is what the reference interpreter computes."""

import math

import pytest
import torch

from popsim_torch import _native
from popsim_torch.enums import PipelineSchedule
from popsim_torch.executor.build import build_executable
from popsim_torch.ir import Graph, LoopCounts, Program, TensorKind
from popsim_torch.reference import Interpreter
from tests.golden.test_programs import CASES, compile_case
from tests.mutants import programs
from tests.mutants.test_mutants import connect, host
from tests.reference.agree import assert_agrees, run_kernel, variables_of

# For whole programs, in which errors add up, in float32 and in float16.
LOOSE = {torch.float32: 2e-4, torch.float16: 2e-2}


def filled(tensor, count=1):
    shape = (count * math.prod(tensor.shape),)
    if tensor.dtype.is_floating_point:
        return torch.rand(shape).to(tensor.dtype)
    return torch.randint(0, 2, shape).to(tensor.dtype)


def run_both(
    program: Program, loop: LoopCounts, training: bool, schedule: PipelineSchedule, runs: int = 2
) -> None:
    """Run a program on both, and compare what comes back and what stays."""
    torch.manual_seed(4)
    graph = program.graph
    executable = build_executable(program, loop, training=training, schedule=schedule)
    executable.seed = 11
    interpreter = Interpreter(program, loop, seed=11, foreign=foreign(graph))
    for tensor_id in variables_of(graph):
        tensor = graph.tensors[tensor_id]
        value = filled(tensor).reshape(tensor.shape)
        executable.write(tensor_id, value)
        interpreter.write(tensor_id, value)
    count = loop.device_iterations * loop.gradient_accumulation
    given = graph.of_kind(TensorKind.INPUT)
    connect(executable, graph, len(given))
    for _ in range(runs):
        inputs = [filled(tensor, count) for tensor in given]
        with _native.translated_errors():
            calls = lambda *call: host(graph, *call)  # noqa: E731
            returned = iter(executable.run([x.clone() for x in inputs], calls))
        expected = interpreter.run(inputs)
        for position, (op, value) in enumerate(zip(program.returns, expected, strict=True)):
            kept = op.attributes["keep"]
            actual = executable.read_kept(position, op.inputs[0]) if kept else next(returned)
            assert_agrees(actual, value, close=LOOSE.get(value.dtype), what=f"return {position}")
    for tensor_id in variables_of(graph):
        actual, expected = executable.read(tensor_id), interpreter.read(tensor_id)
        name = graph.tensors[tensor_id].name
        assert_agrees(actual, expected, close=LOOSE.get(actual.dtype), what=name)


def foreign(graph: Graph):
    """Return what runs code that is not the program's."""

    def run(op, inputs):
        if op.kind == "custom":
            return run_kernel(graph, op, inputs)
        return host(graph, op.attributes["call"], op.attributes["gradient"], inputs)

    return run


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_programs_that_use_every_op(name):
    good = programs.program(name)
    run_both(good.program, good.loop, good.training, good.schedule)


@pytest.mark.parametrize("fitted", [False, True], ids=["as it was lowered", "fitted to the host"])
@pytest.mark.parametrize("name", CASES)
def test_models(name, fitted):
    compiled = compile_case(name).compiled
    program = compiled.host_program if fitted else compiled.program
    run_both(program, compiled.run.loop, True, compiled.run.schedule)
