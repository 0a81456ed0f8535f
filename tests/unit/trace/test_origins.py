"""Where the nodes of a trace come from, and what is printed."""

import inspect

import torch

import popsim_torch as poptorch
from popsim_torch.trace.graph.markers import PRINT
from popsim_torch.trace.graph.origin import origin_of
from tests.unit.trace.traces import Net, X, aten, calls, trace_of


def test_origins_have_scope_and_direction():
    traced = trace_of(Net(), X, training=True)
    (first, second) = calls(traced, aten.addmm.default)
    assert origin_of(first).scope == "fc1"
    assert origin_of(second).scope == "fc2"
    (tanh,) = calls(traced, aten.tanh.default)
    assert origin_of(tanh).scope == ""
    (back,) = calls(traced, aten.tanh_backward.default)
    assert origin_of(back).backward
    assert not origin_of(tanh).backward


def test_backward_has_the_scope_of_its_forward():
    traced = trace_of(Net(), X, training=True)
    scopes = [origin_of(n).scope for n in calls(traced, aten.mm.default) if origin_of(n).backward]
    assert set(scopes) == {"fc1", "fc2"}


def test_the_source_is_the_users_line():
    traced = trace_of(Net(), X)
    (tanh,) = calls(traced, aten.tanh.default)
    path, line = origin_of(tanh).source.rsplit(":", 1)
    assert path == inspect.getsourcefile(Net)
    with open(inspect.getsourcefile(Net), encoding="utf-8") as file:
        assert "torch.tanh(self.fc1(x))" in file.readlines()[int(line) - 1]


def test_stages():
    class Staged(Net):
        def forward(self, x):
            poptorch.Block.start("a", ipu_id=0)
            x = torch.tanh(self.fc1(x))
            poptorch.Block.start("b", ipu_id=1)
            return self.fc2(x), poptorch.identity_loss(self.fc2(x), "sum")

    traced = trace_of(Staged(), X, training=True)
    stages = {origin_of(n).stage for n in calls(traced, aten.tanh.default)}
    assert stages == {0}
    assert {origin_of(n).stage for n in calls(traced, aten.addmm.default)} == {0, 1}
    (back,) = calls(traced, aten.tanh_backward.default)
    assert origin_of(back).stage == 0


def test_prints_are_noted():
    class Prints(Net):
        def forward(self, x):
            x = poptorch.ipu_print_tensor(self.fc1(x), "here", digits=2)
            return poptorch.identity_loss(self.fc2(x), "sum")

    traced = trace_of(Prints(), X, training=True)
    requests = [traced.prints[node.args[1]] for node in calls(traced, PRINT)]
    assert [request.title for request in requests] == ["here", "here"]
    assert [origin_of(node).backward for node in calls(traced, PRINT)] == [False, True]
    assert requests[0].text_format.digits == 2
