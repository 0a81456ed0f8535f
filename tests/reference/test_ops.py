"""Every op of the device's table has an entry in the reference, which the kernel agrees with."""

from dataclasses import replace

import pytest
import torch

from popsim_torch import _native, reference
from popsim_torch.errors import Error, InternalError
from popsim_torch.ir import Graph, LoopCounts, Phase, TensorKind
from popsim_torch.optim.planning import plan_updates
from popsim_torch.reference import OPS, Interpreter
from popsim_torch.reference.elementwise import INSTRUCTIONS
from tests.ops.dense_samples import CONVOLUTIONS, MATMULS
from tests.ops.one_op import OneOp, run_op
from tests.ops.op_samples import OTHERS
from tests.ops.sample import F32, Sample, float32
from tests.ops.test_grouped_updates import SMALL
from tests.ops.test_update_terms import MAKERS
from tests.ops.update_device import Device, some_weight
from tests.reference.agree import REDUCED, assert_agrees, interpreted, run_kernel, variables_of

HALF_SUMS = 1e-2  # a partial sum is rounded to float16 many times


def test_each_op_of_the_table_has_an_entry_and_no_other():
    assert OPS.keys() == {op.name for op in _native.op_table()}
    assert all(function.__doc__ for function in OPS.values())


def test_an_op_that_nobody_knows_is_refused_by_name():
    graph = Graph()
    out = graph.add_tensor(TensorKind.VALUE, F32, (2,))
    graph.add_op("frobnicate", [], [out], phase=Phase.FORWARD, name="fc1/Frobnicate:0")
    with pytest.raises(InternalError, match=r"no op 'frobnicate' \('fc1/Frobnicate:0'\)"):
        Interpreter(graph).run()


def test_what_was_never_written_is_not_read():
    graph = Graph()
    x, y = (graph.add_tensor(TensorKind.VALUE, F32, (2,), name=name) for name in "xy")
    graph.add_op("copy", [x], [y], phase=Phase.FORWARD, name="y")
    with pytest.raises(InternalError, match=r"'x' .* was never written"):
        Interpreter(graph).run()


def test_results_of_another_shape_are_refused():
    graph = Graph()
    x = graph.add_tensor(TensorKind.VARIABLE, F32, (2,), name="x")
    y = graph.add_tensor(TensorKind.VALUE, F32, (3,), name="y")
    graph.add_op("copy", [x], [y], phase=Phase.FORWARD, name="y")
    with pytest.raises(InternalError, match=r"copy 'y' gives shape \[2\] .* has shape \[3\]"):
        Interpreter(graph).run()


def test_each_test_of_an_op_compares_it_with_the_reference(monkeypatch):
    x = torch.arange(3.0)
    run_op("copy", [x], [(F32, (3,))])
    monkeypatch.setitem(OPS, "copy", lambda call, x: x + 1)
    with pytest.raises(AssertionError, match="copy is not what the reference gives, result 0"):
        run_op("copy", [x], [(F32, (3,))])


# --- Ops alone ----------------------------------------------------------------


def tamed(sample: Sample) -> Sample:
    """Return a sample whose results are no matter of chance, and soon found."""
    if sample.kind.startswith("recurrent"):
        # Twenty steps with large weights make the last bit of the first all of the last.
        inputs = [
            (lambda shape: lambda normal: 0.1 * normal(*shape))(value)
            if isinstance(value, tuple)
            else value
            for value in sample.inputs
        ]
        return replace(sample, inputs=inputs)
    return sample


BEAM_SEARCH = Sample(
    "ctc_beam_search",
    "few",
    [lambda normal: normal(9, 4, 6).log_softmax(2), torch.tensor([9, 0, 5, 7])],
    [(4, 3), (torch.int64, (4, 3)), (torch.int64, (4, 3, 9))],
    {"blank": 0, "beam_width": 8, "top_paths": 3},
)
WITHOUT = {"custom", "ctc_beam_search", "ctc_loss_grad"}
SAMPLES = [
    *(tamed(s) for s in (*MATMULS, *CONVOLUTIONS, *OTHERS) if s.kind not in WITHOUT),
    BEAM_SEARCH,
]
CASES = [
    pytest.param(sample, dtype, id=f"{sample.kind}-{sample.name}-{dtype}")
    for sample in SAMPLES
    for dtype in sample.dtypes
]


@pytest.mark.parametrize(("sample", "dtype"), CASES)
def test_the_kernel_agrees(sample, dtype):
    one = sample.compile(dtype)
    close = HALF_SUMS if "partials" in sample.attributes else None
    close = REDUCED.get(sample.attributes.get("precision"), close)
    for actual, expected in zip(one.run(), interpreted(one), strict=True):
        assert_agrees(actual, expected, close=close)


EXACT = ["cat", "copy", "dynamic_slice", "dynamic_update", "embedding", "into_zeros", "max_pool"]
EXACT += ["stochastic_round", "fps", "nearest"]


@pytest.mark.parametrize("kind", EXACT)
def test_what_moves_or_rounds_numbers_gives_the_same_bits(kind):
    for sample in (sample for sample in SAMPLES if sample.kind == kind):
        one = sample.compile(F32)
        for actual, expected in zip(one.run(), interpreted(one), strict=True):
            assert torch.equal(actual, expected)


def test_the_gradient_of_ctc_loss_agrees_on_what_the_loss_has_found():
    loss, grad = (
        next(s for s in OTHERS if s.kind == kind) for kind in ("ctc_loss", "ctc_loss_grad")
    )
    _, alpha = loss.compile(F32).run()
    # The operands of the gradient are drawn after its own first one.
    forward = replace(loss, inputs=[lambda n: (n(9), n(*loss.inputs[0]))[1], *loss.inputs[1:]])
    one = forward.compile(F32)
    alpha = one.run()[1]
    grad = replace(grad, inputs=[*grad.inputs[:-1], alpha])
    one = grad.compile(F32)
    for actual, expected in zip(one.run(), interpreted(one), strict=True):
        assert_agrees(actual, expected, close=1e-4)


def test_code_of_users_is_run_by_whoever_gives_it():
    sample = next(s for s in OTHERS if s.kind == "custom")
    one = sample.compile(F32)
    with pytest.raises(Error, match="custom 'it' runs code that is not the program's"):
        interpreted(one)
    found = interpreted(one, foreign=lambda op, inputs: run_kernel(one.graph, op, inputs))
    assert all(map(torch.equal, one.run(), found))


UNUSUAL = [-torch.inf, -3.5, -2.5, -1.0, -0.5, -0.0, 0.0, 1e-30, 0.5, 1.0, 2.5, 80.0, torch.inf]
UNUSUAL += [torch.nan]


def instruction(name: str, arity: int) -> OneOp:
    """Return an instruction on unusual operands; bounds that are numbers are usual ones."""
    inputs = [torch.tensor(UNUSUAL).roll(5 * i) for i in range(arity)]
    if name == "clamp_to_numbers":
        inputs[1:] = [torch.full_like(inputs[0], bound) for bound in (-1.5, 2.0)]
    attributes = {
        "code": [" ".join([name, *map(str, range(arity))])],
        "constants": [],
        "results": [arity],
        "dtypes": ["float32"],
    }
    return Sample("map", name, inputs, [(F32, (len(UNUSUAL),))], attributes).compile(F32)


def compiles(name: str, arity: int) -> bool:
    try:
        instruction(name, arity)
    except InternalError:
        return False
    return True


@pytest.mark.parametrize("name", [*INSTRUCTIONS, "half", "bfloat16"])
def test_instructions_of_maps(name):
    """On infinities, zeros and numbers that are none, too."""
    arity = next(n for n in (1, 2, 3) if compiles(name, n))
    (actual,), (expected,) = (run(instruction(name, arity)) for run in (OneOp.run, interpreted))
    torch.testing.assert_close(actual, expected, equal_nan=True, rtol=2e-6, atol=1e-30)


# --- Random numbers -----------------------------------------------------------

DRAWS = {
    "p": {"distribution": "bernoulli", "p": 0.3},
    "uniform": {"distribution": "uniform", "from": -1.0, "to": 3.0},
    "normal": {"distribution": "normal", "mean": 0.5, "std": 2.0},
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_random_numbers_are_those_of_the_kernel(draw, dtype):
    held = getattr(torch, dtype)
    attributes = {**draw, "shape": [3, 777], "dtype": dtype, "stream": 2**31 + 5}
    one = Sample("random", "draw", [], [(held, (3, 777))], attributes).compile(F32)
    exact = draw["distribution"] != "normal"
    for actual, expected in zip(one.run(), interpreted(one), strict=True):
        assert_agrees(actual, expected)
        assert not exact or torch.equal(actual, expected)


def test_bernoulli_with_probabilities_of_its_own():
    attributes = {"distribution": "bernoulli", "shape": [70, 9], "dtype": "bool", "stream": 1}
    p = [lambda normal: normal(70, 1).sigmoid()]
    one = Sample("random", "draw", p, [(torch.bool, (70, 9))], attributes).compile(F32)
    assert torch.equal(one.run()[0], interpreted(one)[0])


def test_rounding_at_random_of_all_sizes():
    exponents = torch.linspace(-30, 18, 2000)
    x = torch.cat([2**exponents, -(2**exponents), torch.tensor([0.0, -0.0, 65519.9, 65520.0])])
    inputs = [torch.cat([x, torch.tensor([torch.inf, torch.nan, 1e-45])])]
    shape = tuple(inputs[0].shape)
    one = Sample("stochastic_round", "it", inputs, [(torch.float16, shape)], {"stream": 7})
    (actual,), (expected,) = one.compile(F32).run(), interpreted(one.compile(F32))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


# --- Updates ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_updates_agree(make, dtype):
    torch.manual_seed(3)
    weights = {name: some_weight(shape, dtype) for name, shape in SMALL.items()}
    plan = plan_updates(make(weights.values()), weights, gradient_accumulation=2)
    terms = [term.name for update in plan.updates for term in update.terms]
    device = Device(plan, weights, 2, grouped=True, terms=terms)
    interpreter = reference.Interpreter(device.graph, device.loop)
    for tensor_id in variables_of(device.graph):
        interpreter.write(tensor_id, device.executable.read(tensor_id))
    for _ in range(3):
        gradients = [torch.randn(2, *w.shape).to(dtype) for w in weights.values()]
        device.run(*gradients)
        interpreter.run(gradients)
    variables = [device.graph.tensors[tensor_id] for tensor_id in variables_of(device.graph)]
    # What is kept in float16 may be rounded to the neighbour, and all that follows from it.
    close = 3e-5 if all(variable.dtype == F32 for variable in variables) else 2e-3
    for variable in variables:
        actual, expected = device.executable.read(variable.id), interpreter.read(variable.id)
        assert_agrees(actual, expected, close=close, what=variable.name)


def test_float32_is_float64_in_a_wide_run():
    one = Sample(
        "reduce",
        "it",
        [float32(100, 100)],
        [(F32, ())],
        {
            "function": "sum",
            "axes": [0, 1],
            "keepdim": False,
            "dtype": "float32",
        },
    ).compile(F32)
    (wide,) = interpreted(one, wide=True)
    assert wide.dtype == torch.float64
    ((_, memory),) = one.memory
    assert wide == memory.double().sum()


def test_the_position_counts_over_all_runs():
    graph = Graph()
    out = graph.add_tensor(TensorKind.VALUE, torch.int64, (2,))
    graph.add_op("position", [], [out], phase=Phase.FORWARD, name="position")
    interpreter = Interpreter(graph, LoopCounts(2, 3))
    for last in (1, 3):
        interpreter.run()
        assert interpreter.read(out.id).tolist() == [last, 2]
