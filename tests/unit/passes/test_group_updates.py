"""Grouping the weight updates of a model into one op per kind."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import OutputMode, optim
from popsim_torch.ir import Graph, Op, Phase, Tensor, TensorKind
from popsim_torch.passes import pipeline
from popsim_torch.passes.group_updates import group_updates
from tests.sweeps import one_by_one
from tests.unit.passes.sketch import verify_sketch

F32 = torch.float32


def variable(graph: Graph, shape=(4,), name="") -> Tensor:
    return graph.add_tensor(TensorKind.VARIABLE, F32, shape, name=name)


def add_update(graph, weight, kind="adam_update", attributes=None, stage=0, num_scalars=2) -> Op:
    gradient = graph.add_tensor(TensorKind.INPUT, F32, weight.shape)
    scalars = [variable(graph, ()) for _ in range(num_scalars)]
    out = graph.add_view(weight, weight.shape, weight.strides, 0)
    return graph.add_op(
        kind,
        [weight, gradient, *scalars],
        [out],
        attributes,
        phase=Phase.UPDATE,
        stage=stage,
        name=weight.name,
    )


def copy_of(op: Op) -> tuple[list[int], list[int]]:
    return list(op.inputs), list(op.outputs)


def test_updates_of_a_kind_become_one_op() -> None:
    graph = Graph()
    ops = [add_update(graph, variable(graph, (size,), f"w{size}")) for size in (3, 5, 7)]
    parts = [copy_of(op) for op in ops]
    assert group_updates(graph) == 2
    verify_sketch(graph)
    (op,) = graph.ops
    assert op.attributes == {"parameters": 3}
    assert op.inputs == [i for inputs, _ in parts for i in inputs]
    assert op.outputs == [i for _, outputs in parts for i in outputs]
    assert op.name == "w3 and 2 more"
    assert group_updates(graph) == 0
    assert graph.ops == [op]


def test_a_group_takes_in_later_updates() -> None:
    graph = Graph()
    for size in (3, 5):
        add_update(graph, variable(graph, (size,)))
    group_updates(graph)
    add_update(graph, variable(graph))
    assert group_updates(graph) == 1
    assert [op.attributes for op in graph.ops] == [{"parameters": 3}]


def test_an_update_alone_stays_as_it_is() -> None:
    graph = Graph()
    add_update(graph, variable(graph))
    assert group_updates(graph) == 0
    assert graph.ops[0].attributes == {}


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "sgd_momentum_update"},
        {"attributes": {"max_grad_norm": 1.0}},
        {"stage": 1},
        {"num_scalars": 3},
    ],
    ids=str,
)
def test_what_stays_apart(change) -> None:
    graph = Graph()
    add_update(graph, variable(graph))
    add_update(graph, variable(graph), **change)
    add_update(graph, variable(graph))
    add_update(graph, variable(graph), **change)
    assert group_updates(graph) == 2
    assert [op.attributes["parameters"] for op in graph.ops] == [2, 2]


def test_plain_sgd_stays_as_it_is() -> None:
    graph = Graph()
    kinds = ["sgd_update", "sgd_product_update", "sgd_update"]
    for kind in kinds:
        add_update(graph, variable(graph), kind=kind)
    assert group_updates(graph) == 0
    assert [op.kind for op in graph.ops] == kinds


def test_anchors_stay_behind_the_update() -> None:
    graph = Graph()
    for _ in range(2):
        weight = variable(graph)
        add_update(graph, weight)
        graph.add_op("anchor", [weight], [], phase=Phase.UPDATE)
    assert group_updates(graph) == 1
    assert [op.kind for op in graph.ops] == ["adam_update", "anchor", "anchor"]


@pytest.mark.parametrize("how", ["read", "written"])
def test_an_update_stays_behind_what_touches_its_weight(how) -> None:
    graph = Graph()
    first, second, third = (variable(graph) for _ in range(3))
    add_update(graph, first)
    touched = ([second], []) if how == "read" else ([], [second])
    graph.add_op("anchor", *touched, phase=Phase.UPDATE)
    add_update(graph, second)
    add_update(graph, third)
    assert group_updates(graph) == 1
    assert [op.kind for op in graph.ops] == ["adam_update", "anchor", "adam_update"]
    assert graph.ops[2].attributes == {"parameters": 2}


def test_an_update_stays_behind_what_computes_its_gradient() -> None:
    graph = Graph()
    add_update(graph, variable(graph))
    gradient = graph.add_tensor(TensorKind.VALUE, F32, (4,))
    graph.add_op("map", [], [gradient], phase=Phase.UPDATE)
    second = add_update(graph, variable(graph))
    second.inputs[1] = gradient.id
    assert group_updates(graph) == 0


def test_two_updates_of_a_weight_stay_two() -> None:
    graph = Graph()
    weight = variable(graph)
    add_update(graph, weight)
    add_update(graph, weight)
    assert group_updates(graph) == 0


# --- In training ------------------------------------------------------------------

BATCH = 4


class Net(nn.Module):
    """Two layers with a norm, on the requested number of IPUs."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 40)
        self.norm = nn.LayerNorm(40)
        self.fc2 = nn.Linear(40, 3)
        self._stages = stages

    def forward(self, x, labels):
        poptorch.Block.start(ipu_id=0)
        x = torch.tanh(self.norm(self.fc1(x)))
        poptorch.Block.start(ipu_id=self._stages - 1)
        x = self.fc2(x).float()
        return x, nn.functional.cross_entropy(x, labels)


def two_groups(net):
    return [
        {"params": net.fc1.parameters(), "lr": 0.1},
        {"params": [*net.norm.parameters(), *net.fc2.parameters()], "lr": 0.02},
    ]


OPTIMIZERS = {
    "nesterov": lambda net: optim.SGD(two_groups(net), lr=0.1, momentum=0.9, nesterov=True),
    "momentum": lambda net: optim.SGD(two_groups(net), lr=0.1, momentum=0.9),
    "combined": lambda net: optim.SGD(
        two_groups(net), lr=0.1, momentum=0.9, use_combined_accum=True
    ),
    "clipped Adam": lambda net: optim.Adam(two_groups(net), lr=0.1, max_grad_norm=0.1),
    "AdamW": lambda net: optim.AdamW(two_groups(net), lr=0.1, weight_decay=0.1),
    "LAMB": lambda net: optim.LAMB(two_groups(net), lr=0.1, weight_decay=0.1),
    "RMSprop": lambda net: optim.RMSprop(two_groups(net), lr=0.1),
}
# Device iterations, gradient accumulation, stages.
LOOPS = [(1, 1, 1), (2, 2, 1), (1, 4, 2)]
PARAMETERS = ("fc1.weight", "fc1.bias", "norm.weight", "norm.bias", "fc2.weight", "fc2.bias")


def train(make, loop, dtype, *, anchored):
    """Return losses, weights, states and anchors of some steps, and the kinds of the updates."""
    d, ga, stages = loop
    torch.manual_seed(5)
    net = Net(stages).to(dtype)
    options = poptorch.Options()
    options.showCompilationProgressBar(False)
    options.deviceIterations(d)
    options.Training.gradientAccumulation(ga)
    names = [f"{kind}___{name}" for kind in ("UpdatedVar", "Gradient") for name in PARAMETERS]
    for number, name in enumerate(names if anchored else []):
        mode = (OutputMode.All, OutputMode.Final)[number % 2]
        options.anchorTensor(name, name, mode)
    optimizer = make(net)
    model = poptorch.trainingModel(net, options, optimizer)
    values = []
    for step in range(3):
        count = BATCH * d * ga
        values += model(torch.randn(count, 6).to(dtype), torch.randint(0, 3, (count,)))
        values += [model.getAnchoredTensor(name) for name in names if anchored]
        if step == 1:
            optimizer.param_groups[1]["lr"] = 0.05
            model.setOptimizer(optimizer)
    values += [parameter.detach().clone() for parameter in net.parameters()]
    compiled = model.compiled
    values += [compiled.executable.read(i) for _, i in sorted(compiled.program.states.items())]
    kinds = [op.kind for op in model.compiled.host_program.graph.ops if op.phase == Phase.UPDATE]
    return values, [kind for kind in kinds if kind.endswith("_update")]


@pytest.mark.parametrize(
    ("name", "loop", "dtype", "anchored"),
    one_by_one(OPTIMIZERS, LOOPS, [torch.float32, torch.float16], [False, True]),
)
def test_training_keeps_its_bits(name, loop, dtype, anchored, monkeypatch) -> None:
    make = OPTIMIZERS[name]
    values, kinds = train(make, loop, dtype, anchored=anchored)
    assert len(kinds) == 1
    passes = tuple(each for each in pipeline.HOST_PASSES if each is not group_updates)
    monkeypatch.setattr(pipeline, "HOST_PASSES", passes)
    expected, kinds = train(make, loop, dtype, anchored=anchored)
    assert len(kinds) == len(PARAMETERS)
    assert len(values) == len(expected)
    for value, other in zip(values, expected, strict=True):
        assert torch.equal(value, other)
