"""Fitting a program to the host changes no bit: graphs with each of the passes switched off."""

import copy

import pytest
import torch
from hypothesis import given, settings

import popsim_torch as poptorch
from popsim_torch.enums import OutputMode
from popsim_torch.passes import pipeline
from tests.parity.compare import quiet_options
from tests.parity.models import CASES
from tests.parity.test_random_graphs import COMMON, LEARNING_RATE, Graph, Recipe, recipes

PASSES = {run_pass.__name__: run_pass for run_pass in pipeline.HOST_PASSES}


def without(name):
    """Return the host passes but one; all of them for ``none``, and none of them for ``all``."""
    if name == "all":
        return ()
    return tuple(run_pass for each, run_pass in PASSES.items() if each != name)


def train(model, inputs, options, passes, *, calls=1):
    """Return what a copy of a model gives and becomes under some of the host passes."""
    model = copy.deepcopy(model)
    options.outputMode(OutputMode.All).randomSeed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "HOST_PASSES", passes)
        device = poptorch.trainingModel(model, options, optimizer)
        for _ in range(calls):
            results = device(*(x.clone() for x in inputs))
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    return results + [weight.detach().clone() for weight in model.parameters()]


def same_bits(ours, theirs):
    return len(ours) == len(theirs) and all(
        a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
        for a, b in zip(ours, theirs, strict=True)
    )


def check(recipe: Recipe, switched_off) -> None:
    model, inputs = Graph(recipe), recipe.make_inputs()
    try:
        expected = train(model, inputs, recipe.loop.options(), without("none"))
    except (poptorch.Error, RuntimeError):
        return  # the graph itself is refused
    for name in switched_off:
        ours = train(model, inputs, recipe.loop.options(), without(name))
        assert same_bits(ours, expected), name


@settings(max_examples=15, derandomize=True, **COMMON)
@given(recipes)
def test_random_graphs_without_any_pass(recipe):
    check(recipe, ["all"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=300, print_blob=True, **COMMON)
@given(recipes)
def test_many_random_graphs_without_each_pass(recipe):
    check(recipe, ["all", *PASSES])


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("name", CASES)
def test_models_without_each_pass(name, dtype):
    case = CASES[name]
    torch.manual_seed(2)
    model = case.make().to(dtype)
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in case.inputs(4)]
    expected = train(model, inputs, quiet_options(), without("none"), calls=2)
    for switched_off in ("all", *PASSES):
        ours = train(model, inputs, quiet_options(), without(switched_off), calls=2)
        assert same_bits(ours, expected), switched_off
