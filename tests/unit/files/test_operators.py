"""A program from a file may only call operators that compute, in the forms of lowering."""

import json
import os

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.errors import Error
from popsim_torch.files import container
from popsim_torch.files.operators import OPERATORS, REFUSED, check_operators, foreign_operators
from popsim_torch.ir import Graph, Phase, TensorArgument, TensorKind
from popsim_torch.lowering.rules.aten import out_overload
from tests.options import make_options
from tests.unit.executor.nets import Function

X = {"TensorArgument": {"input": 0}}


@pytest.fixture
def saved(tmp_path):
    """Return a function that saves a model and makes its file call another operator."""

    def save(operator, overload, arguments, **more):
        model = poptorch.inferenceModel(Function(torch.erfinv), make_options())
        path = tmp_path / "file"
        model.compileAndExport(path, torch.zeros(4))
        sections = container.read_sections(path, "a compiled model")
        data = json.loads(sections["program"])
        ops = [op["Op"] for op in data["Program"]["graph"]["Graph"]["ops"]]
        (op,) = (op for op in ops if op["kind"] == "aten")
        found = {"operator": operator, "overload": overload, "arguments": arguments, **more}
        op["attributes"] = {"dict": [list(item) for item in found.items()]}
        sections["program"] = json.dumps(data).encode()
        container.write_sections(path, "a compiled model", sections)
        return path

    return save


@pytest.mark.parametrize(
    ("operator", "overload", "arguments"),
    [
        ("aten::_print", "", ["hello"]),
        ("aten::empty", "memory_format", [[4], 6, None, None, None, None]),
        ("aten::as_strided", "", [X, [4], [1], 100]),
        ("aten::_convert_indices_from_coo_to_csr", "", [X, 3, True]),
        ("aten::resize_as", "", [X, X, None]),
        ("aten::set_data", "", [X, X]),
        ("prims::cos", "", [X]),
        ("aten::nothing", "", [X]),
        (["aten::cos"], "", [X]),
        (None, "", [X]),
    ],
    ids=str,
)
def test_operators_outside_of_the_list_are_refused(saved, operator, overload, arguments, capfd):
    with pytest.raises(Error):
        poptorch.load(saved(operator, overload, arguments))
    assert "hello" not in capfd.readouterr().out


def test_loading_touches_no_file(saved, tmp_path):
    path, target = saved("aten::from_file", "", [str(tmp_path / "new"), True, 4, 6]), "new"
    with pytest.raises(Error, match=r"calls aten::from_file, .*loadExecutable on the executor\.$"):
        poptorch.load(path)
    assert target not in os.listdir(tmp_path)


def with_body(depth, operator, arguments):
    """A program that calls an operator in a loop, which is inside other loops."""
    graph = Graph()
    x = graph.add_tensor(TensorKind.INPUT, torch.float32, (4,))
    y = graph.add_tensor(TensorKind.VALUE, torch.float32, (4,))
    if depth:
        loop = {"count": 2, "carried": 1}
        bodies = [with_body(depth - 1, operator, arguments)]
        graph.add_op("loop", [x], [y], loop, phase=Phase.FORWARD, bodies=bodies)
    else:
        call = {"operator": operator, "overload": "", "arguments": arguments}
        graph.add_op("aten", [x], [y], call, phase=Phase.FORWARD)
    graph.add_op("yield", [y], [], phase=Phase.FORWARD)
    return graph


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_operators_in_bodies_are_those_of_the_list(depth):
    x = TensorArgument(0)
    check_operators(with_body(depth, "aten::erfinv", [x]))
    with pytest.raises(Error, match="calls aten::_print, which no file may do by itself"):
        check_operators(with_body(depth, "aten::_print", ["hello"]))
    with pytest.raises(ValueError, match=r"calls aten::erfinv\., but it takes 1 arguments"):
        check_operators(with_body(depth, "aten::erfinv", [x, x]))


@pytest.mark.parametrize(
    ("overload", "arguments", "more"),
    [
        ("no such overload", [X, 2], {}),
        ("out", [X, 2], {}),
        ("", [X], {}),
        ("", [X, 2], {"out": "out"}),
        ("", [X, X], {}),
        ("", [{"TensorArgument": {"input": 7}}, 2], {}),
        ("", [{"TensorArgument": {"input": -1}}, 2], {}),
    ],
    ids=str,
)
def test_other_forms_of_an_operator_are_refused(saved, overload, arguments, more):
    with pytest.raises(Error, match=r"calls aten::mvlgamma\."):
        poptorch.load(saved("aten::mvlgamma", overload, arguments, **more))


def graph_of(operator, shapes, arguments, dtype=torch.float32):
    graph = Graph()
    inputs = [graph.add_tensor(TensorKind.VARIABLE, dtype, shape) for shape in shapes]
    attributes = {"operator": f"aten::{operator}", "overload": "", "arguments": arguments}
    graph.add_op("aten", inputs, [], attributes, phase=Phase.FORWARD, name="it")
    return graph


A, B, C = map(TensorArgument, range(3))


@pytest.mark.parametrize(
    ("operator", "right", "wrong", "arguments"),
    [
        ("_log_softmax_backward_data", [(2, 3), (2, 3)], [(2, 3), (2, 2)], [A, B, 1, 6]),
        (
            "reflection_pad2d_backward",
            [(1, 4, 4), (1, 2, 2)],
            [(1, 4, 4), (9, 2, 2)],
            [A, B, [1] * 4],
        ),
        (
            "avg_pool2d_backward",
            [(1, 2, 2, 2), (1, 2, 4, 4)],
            [(1, 2, 4, 4), (1, 2, 4, 4)],
            [A, B, [2, 2], [], [0, 0], False, True, None],
        ),
        (
            "_adaptive_avg_pool2d_backward",
            [(1, 2, 2, 2), (1, 2, 4, 4)],
            [(1, 2, 2, 2), (1, 2, 4, 0)],
            [A, B],
        ),
        (
            "adaptive_max_pool2d_backward",
            [(1, 2, 2, 2), (1, 2, 4, 4), (1, 2, 2, 2)],
            [(1, 2, 2, 2), (1, 2, 4, 4), (1, 2, 1, 1)],
            [A, B, C],
        ),
        ("unfold_backward", [(3, 2)], [(4, 2)], [A, [4], 0, 2, 1]),
        (
            "nll_loss_backward",
            [(), (3, 2), (3,)],
            [(), (3, 2), (2,)],
            [A, B, C, None, 1, -100, A],
        ),
        (
            "grid_sampler_2d_backward",
            [(1, 2, 3, 3), (1, 2, 4, 4), (1, 3, 3, 2)],
            [(1, 2, 3, 3), (1, 9, 4, 4), (1, 3, 3, 2)],
            [A, B, C, 0, 0, False, [True, True]],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_gradients_have_the_shapes_of_their_forward(operator, right, wrong, arguments):
    check_operators(graph_of(operator, right, arguments))
    with pytest.raises(ValueError, match=f"calls aten::{operator}.*, but with"):
        check_operators(graph_of(operator, wrong, arguments))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([4, 6, 0, "cpu", None], None),
        ([4, None, None, None, False], None),
        ([4, 6, 0, "meta", None], "device"),
        ([4, 6, 0, "cuda:0", None], "device"),
        ([4, 6, 1, "cpu", None], "layout"),
        ([4, 13, 0, "cpu", None], "dtype"),
        ([4, 8, 0, "cpu", None], "dtype"),
        ([4, 6, 0, "cpu", True], "pin_memory"),
    ],
    ids=str,
)
def test_tensors_are_made_as_the_device_has_them(arguments, problem):
    graph = graph_of("eye", [], arguments)
    if problem is None:
        check_operators(graph)
        return
    with pytest.raises(ValueError, match=f"its argument '{problem}' cannot be"):
        check_operators(graph)


def test_every_operator_of_the_lists_is_there():
    assert not OPERATORS & REFUSED.keys()
    for name in OPERATORS | REFUSED.keys():
        packet = getattr(torch.ops.aten, name.removeprefix("aten::"))
        found = [getattr(packet, overload) for overload in packet.overloads()]
        assert any(not overload._schema.is_mutable for overload in found)


# --- Models that run what a file may not name ---------------------------------


@torch.library.custom_op("popsim_tests::tripled", mutates_args=())
def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


tripled.register_fake(torch.empty_like)


@poptorch.register_custom_op("Tripled", domain="popsim_tests")
def tripled_kernel(x):
    return x * 3


def custom_op(x):
    return poptorch.custom_op([x], "Tripled", "popsim_tests", 1, example_outputs=[x])[0]


# For each operator, a function that calls it.
OWN = {"popsim_tests::tripled": tripled, "popsim_tests::Tripled": custom_op}


class Tripled(nn.Module):
    def __init__(self, operator):
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.operator = operator

    def forward(self, x):
        return self.operator(self.fc(x))


@pytest.mark.parametrize("name", OWN)
def test_a_models_own_operator_is_loaded_into_the_model_alone(name, tmp_path, caplog):
    net, x, path = Tripled(OWN[name]), torch.randn(4, 3), tmp_path / "file"
    model = poptorch.inferenceModel(net, make_options())
    model.compileAndExport(path, x)
    assert f"calls {name}" in caplog.text
    assert "poptorch.load will refuse the file" in caplog.text
    with pytest.raises(Error, match=rf"file: Its program calls {name}, .*executor\.$"):
        poptorch.load(path)
    again = poptorch.inferenceModel(net, make_options())
    again.loadExecutable(path)
    torch.testing.assert_close(again(x), 3 * net.fc(x))


def test_without_the_model_there_is_no_warning(tmp_path, caplog):
    model = poptorch.inferenceModel(Tripled(tripled), make_options())
    model.compileAndExport(tmp_path / "file", torch.randn(4, 3), export_model=False)
    assert "popsim_tests" not in caplog.text


@pytest.mark.parametrize("name", OWN)
def test_a_models_own_operator_is_not_cached(name, tmp_path):
    net, x = Tripled(OWN[name]), torch.randn(4, 3)
    for _ in range(2):
        options = make_options().enableExecutableCaching(tmp_path)
        torch.testing.assert_close(poptorch.inferenceModel(net, options)(x), 3 * net.fc(x))
    assert os.listdir(tmp_path) == []


class Layers(nn.Module):
    """Layers whose forward and backward are not ops of the device."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReflectionPad2d(1),
            nn.Conv2d(2, 3, 3),
            nn.ReplicationPad2d(1),
            nn.PReLU(),
            nn.AdaptiveMaxPool2d(4),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.ELU(),
            nn.AdaptiveAvgPool2d((3, 5)),
            nn.Mish(),
        )

    def forward(self, x, y):
        out = self.layers(x)
        return out, nn.functional.cross_entropy(out, y)


def test_training_with_the_long_tail_goes_on(tmp_path):
    torch.manual_seed(0)
    net = Layers()
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1)
    model = poptorch.trainingModel(net, make_options(), optimizer)
    batch = torch.randn(2, 2, 8, 8), torch.randint(0, 3, (2, 3, 5))
    model(*batch)
    graph = model.compiled.program.graph
    assert {"aten::nll_loss2d_backward", "aten::adaptive_max_pool2d_backward"} <= {
        op.attributes["operator"] for op in graph.ops if op.kind == "aten"
    }
    assert foreign_operators(graph) == []
    model.save(tmp_path / "file")
    loaded = poptorch.load(tmp_path / "file")
    assert all(torch.equal(a, b) for a, b in zip(loaded(*batch), model(*batch), strict=True))


def test_operators_that_write_in_place_are_in_the_list():
    for name in ("cat", "cumsum", "amax", "mean"):
        packet = getattr(torch.ops.aten, name)
        assert f"aten::{name}" in OPERATORS
        assert any(out_overload(getattr(packet, o)) for o in packet.overloads())


def test_memory_read_as_another_type_is_saved(tmp_path):
    model = poptorch.inferenceModel(Function(lambda x: x.view(torch.int32) >> 23), make_options())
    x = torch.tensor([1.0, -2.0, 0.5])
    model.compileAndExport(tmp_path / "file", x)
    assert torch.equal(poptorch.load(tmp_path / "file")(x), x.view(torch.int32) >> 23)


@pytest.mark.parametrize(
    ("operator", "shape", "arguments", "problem"),
    [
        ("_fft_c2c", (4, 6), [A, [0, -1], 0, True], None),
        ("_fft_c2c", (4, 6), [A, [2], 0, True], r"but along the axes \[2\] of a tensor of 2"),
        ("_fft_c2c", (4, 6), [A, [1, -1], 0, True], r"but along the axes \[1, -1\]"),
        ("_fft_c2c", (4, 6), [A, [], 0, True], r"but along the axes \[\]"),
        ("_fft_c2c", (), [A, [0], 0, True], r"but along the axes \[0\] of a tensor of 0"),
        ("_fft_c2c", (4, 6), [A, [1], 3, True], "but with the norm 3"),
        ("_fft_r2c", (4, 6), [A, [5], 0, True], r"but along the axes \[5\]"),
        ("_fft_c2r", (4, 6), [A, [1], 0, 10], None),
        ("_fft_c2r", (4, 6), [A, [1], 0, 12], "but to 12 numbers from 6"),
        ("_fft_c2r", (4, 1), [A, [1], 0, 0], "but to 0 numbers from 1"),
    ],
    ids=str,
)
def test_fourier_transforms_are_along_axes_of_their_tensor(operator, shape, arguments, problem):
    dtype = torch.float32 if operator == "_fft_r2c" else torch.complex64
    graph = graph_of(operator, [shape], arguments, dtype)
    if problem is None:
        check_operators(graph)
        return
    with pytest.raises(ValueError, match=problem):
        check_operators(graph)
