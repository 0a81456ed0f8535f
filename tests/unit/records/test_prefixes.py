"""The same model below different paths, and tensors that only seem to correspond."""

import pytest

from popsim_torch.ir import names
from popsim_torch.records import RecordedTensor
from popsim_torch.records.pairs import pair_tensors, unlike_tensors
from popsim_torch.records.prefixes import Prefixes, find_prefixes
from popsim_torch.records.tensors import OUTPUT

SHAPES = {"fc1.weight": (5, 6), "fc1.bias": (5,), "fc2.weight": (3, 5), "fc2.bias": (3,)}


def program(path="", shapes=None, more=()):
    """Return what a run of a program says of its tensors: a model below a path."""
    dotted = f"{path}." if path else ""
    slashed = dotted.replace(".", "/")
    found = [RecordedTensor("input", (4, 6), kind="input")]
    for weight, shape in (SHAPES if shapes is None else shapes).items():
        name = dotted + weight
        module = name.rpartition(".")[0]
        found += [
            RecordedTensor(name, shape, module=module, kind="weight"),
            RecordedTensor(names.gradient(name), shape, module=module, kind="gradient"),
            RecordedTensor(names.updated(name), shape, module=module, kind="updated weight"),
        ]
    for op, shape in {"fc1/Gemm:0": (4, 5), "fc2/Gemm:0": (4, 3), "Nll:0": ()}.items():
        name = slashed + op
        module = name.rpartition("/")[0].replace("/", ".")
        found.append(RecordedTensor(name, shape, None, module, "activation", "net.py:1"))
    return {one.name: one for one in [*found, *more]}


def eager():
    """Return what a run of PyTorch says of the same model."""
    found = [RecordedTensor("input", (4, 6), kind="input")]
    for module, shape in {"fc1": (4, 5), "fc2": (4, 3), "": ()}.items():
        name = module or "(model)"
        found.append(RecordedTensor(name, shape, module=module, kind=OUTPUT))
    for weight, shape in SHAPES.items():
        found.append(RecordedTensor(names.gradient(weight), shape, kind="gradient"))
        found.append(RecordedTensor(names.updated(weight), shape, kind="updated weight"))
    return {one.name: one for one in found}


@pytest.mark.parametrize("a", ["", "model", "net.0"])
@pytest.mark.parametrize("b", ["", "model", "m"])
def test_the_same_model_below_another_path(a, b):
    ours, theirs = program(a), program(b)
    expected = Prefixes() if a == b else Prefixes(a, b)
    assert find_prefixes(ours, theirs) == expected
    pairs = pair_tensors(ours, theirs)
    assert pairs == dict(zip(ours, theirs, strict=True))
    assert pair_tensors(theirs, ours) == {other: one for one, other in pairs.items()}


@pytest.mark.parametrize("path", ["", "model", "m.net"])
def test_outputs_of_modules_below_another_path(path):
    ours, theirs = eager(), program(path)
    pairs = pair_tensors(ours, theirs)
    assert set(pairs) == set(ours)
    begin = f"{path.replace('.', '/')}/" if path else ""
    assert pairs["fc2"] == f"{begin}fc2/Gemm:0" and pairs["(model)"] == f"{begin}Nll:0"
    assert pair_tensors(theirs, ours) == {other: one for one, other in pairs.items()}


def test_ops_outside_of_the_model_do_not_correspond_by_their_numbers():
    start = RecordedTensor("Reshape:0", (), kind="activation")
    loss = RecordedTensor("Reshape:0", (), kind="activation", source="train.py:3")
    rate = RecordedTensor("rate___default___FLOAT", (), kind="hyper-parameter")
    module = RecordedTensor("loss/Nll:0", (), module="loss", kind="activation", source="l.py:1")
    gradient = RecordedTensor("Gradient___0_1", (), kind="gradient")
    ours = program("model", more=[loss, rate, module, gradient])
    theirs = program("m", more=[start, rate, module, gradient])
    pairs = pair_tensors(ours, theirs)
    assert set(ours) - set(pairs) == {"Reshape:0", "Gradient___0_1"}
    assert pairs["rate___default___FLOAT"] == "rate___default___FLOAT"
    assert pairs["loss/Nll:0"] == "loss/Nll:0"


def test_an_op_of_the_user_is_not_one_that_starts_the_backward_pass():
    gradient = RecordedTensor("Gradient___Reshape:0", (), kind="gradient")
    start = RecordedTensor("Reshape:0", (), kind="activation")
    loss = RecordedTensor("Reshape:0", (), kind="activation", source="train.py:3")
    ours, theirs = program(more=[loss, gradient]), program(more=[start, gradient])
    assert set(ours) - set(pair_tensors(ours, theirs)) == {"Reshape:0", "Gradient___Reshape:0"}
    assert "Reshape:0" in pair_tensors(ours, ours)
    assert "Reshape:0" in pair_tensors(ours, eager() | {"Reshape:0": start})  # it knows no lines


@pytest.mark.parametrize(
    "other",
    [
        RecordedTensor("x", (3,), kind="activation"),
        RecordedTensor("x", (2,), kind="gradient"),
        RecordedTensor("x", (2,), kind="input"),
    ],
)
def test_tensors_of_another_shape_or_kind_do_not_correspond(other):
    ours = program(more=[RecordedTensor("x", (2,), kind="activation")])
    theirs = program(more=[other])
    assert "x" not in pair_tensors(ours, theirs)
    assert unlike_tensors(ours, theirs, Prefixes()) == [("x", "x")]


@pytest.mark.parametrize(
    "other",
    [
        RecordedTensor("x"),
        RecordedTensor("x", (2,)),
        RecordedTensor("x", (2,), kind="recomputed"),
        RecordedTensor("x", None, kind=OUTPUT),
    ],
)
def test_what_is_not_known_is_no_other_shape_or_kind(other):
    ours = program(more=[RecordedTensor("x", (2,), kind="activation")])
    theirs = program(more=[other])
    assert pair_tensors(ours, theirs)["x"] == "x"
    assert unlike_tensors(ours, theirs, Prefixes()) == []


def test_results_of_unknown_shapes_are_outputs_only_if_there_is_no_other():
    """A ``RunWriter`` that is a sink knows no shapes."""
    names_of_ops = ("fc1/Gemm:0", "fc1/Transpose:0", "fc2/Gemm:0")
    unknown = {name: RecordedTensor(name) for name in names_of_ops}
    assert pair_tensors(eager(), unknown) == {"fc2": "fc2/Gemm:0"}


def test_a_part_of_a_larger_model():
    both = program("gan.generator") | program("gan.judge", {"out.weight": (1, 9)})
    assert find_prefixes(both, program()) == Prefixes("gan.generator", "")
    assert pair_tensors(program(), both)["fc1/Gemm:0"] == "gan/generator/fc1/Gemm:0"


def test_two_models_that_fit_equally_well_are_not_guessed():
    both = program("first") | program("second")
    assert find_prefixes(program(), both) == Prefixes()
    assert set(pair_tensors(program(), both)) == {"input"}


def test_models_with_few_names_in_common_keep_their_names():
    other = program("m", {f"layer{i}.weight": (7, i) for i in range(9)} | {"fc1.bias": (5,)})
    assert find_prefixes(program(), other) == Prefixes()


def test_a_model_with_another_layer():
    more = program("model", {**SHAPES, "fc3.weight": (3, 3)})
    assert find_prefixes(program(), more) == Prefixes("", "model")
    assert set(pair_tensors(program(), more)) == set(program())


def test_names_that_are_the_same_come_first():
    """A model within a model of the same layers is not taken for it."""
    twice = program() | program("model")
    assert find_prefixes(program(), twice) == Prefixes()
    assert pair_tensors(program(), twice) == {name: name for name in program()}


@pytest.mark.timeout(60)
def test_large_models_and_strange_names_take_little_time():
    shapes = {f"layers.{i}.fc.weight": (8, 8) for i in range(3000)}
    ours = program("", shapes)
    assert find_prefixes(ours, program("model", shapes)) == Prefixes("", "model")
    others = {f"blocks.b{i}.attention.weight": (8, 8) for i in range(3000)}
    assert find_prefixes(ours, program("", others)) == Prefixes()
    deep = program("", {"a." * 50_000 + "weight": (8, 8)})
    assert find_prefixes(deep, deep) == Prefixes()
