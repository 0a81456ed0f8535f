"""The programs that the C++ library refuses to run, rule by rule."""

from __future__ import annotations

import pytest
import torch

from popsim_torch import _native
from popsim_torch.errors import InternalError
from popsim_torch.ir import Graph, Op, Phase, Tensor, TensorKind
from popsim_torch.passes.native_graph import to_native

F32 = torch.float32
RELU = {"code": ["relu 0"], "constants": [], "results": [1], "dtypes": ["float32"]}


class Program:
    """``y = relu(x)``, ``z = y @ w``, then an update of w."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.x = self.add(TensorKind.INPUT, (2, 3), "x")
        self.w = self.add(TensorKind.VARIABLE, (3, 4), "w")
        self.y = self.add(TensorKind.VALUE, (2, 3), "y")
        self.z = self.add(TensorKind.VALUE, (2, 4), "z")
        self.g = self.add(TensorKind.VALUE, (3, 4), "g")
        self.scalar = self.add(TensorKind.VARIABLE, (), "scalar")
        self.seen = self.graph.add_view(self.w, (3, 4), (4, 1), 0)
        transposed = self.graph.add_view(self.y, (3, 2), (1, 3), 0)
        self.map = self.op("map", [self.x], [self.y], RELU)
        self.product = self.op("matmul", [self.y, self.w], [self.z])
        self.gradient = self.op("matmul", [transposed, self.z], [self.g], phase=Phase.BACKWARD)
        inputs = [self.w, self.g, self.scalar, self.scalar]
        self.update = self.op("sgd_update", inputs, [self.seen], phase=Phase.UPDATE)

    def add(self, kind: TensorKind, shape: tuple[int, ...], name: str) -> Tensor:
        return self.graph.add_tensor(kind, F32, shape, name=name)

    def op(self, kind, inputs, outputs, attributes=None, phase=Phase.FORWARD, stage=0) -> Op:
        return self.graph.add_op(
            kind, inputs, outputs, dict(attributes or {}), phase=phase, stage=stage, name=kind
        )

    def verify(self, *, in_flight: bool = False) -> None:
        with _native.translated_errors():
            to_native(self.graph).verify(in_flight)


@pytest.fixture
def program() -> Program:
    return Program()


def refused(program: Program, problem: str, *, in_flight: bool = False) -> None:
    with pytest.raises(InternalError) as caught:
        program.verify(in_flight=in_flight)
    assert problem in str(caught.value)


def test_a_good_program(program):
    program.verify()
    program.verify(in_flight=True)


# --- Tensors ---


@pytest.mark.parametrize("shape", [(2, -3), (2**40, 2**40)], ids=str)
def test_sizes_that_no_tensor_has(program, shape):
    program.x.shape = shape
    refused(program, "tensor 'x' has sizes that are negative or too large")


def test_a_stride_too_many(program):
    program.seen.strides = (4, 1, 1)
    refused(program, "must have one stride for each axis")


def test_an_owner_that_is_not_contiguous(program):
    program.x.strides = (1, 2)
    refused(program, "'x' owns memory and must be contiguous")


def test_an_owner_with_a_base(program):
    program.x.base = 1
    refused(program, "'x' owns memory and must have no base")


@pytest.mark.parametrize("base", [-1, 99, "seen"])
def test_a_view_of_nothing_or_of_a_view(program, base):
    view = program.graph.add_view(program.w, (3, 4), (4, 1), 0)
    view.base = program.seen.id if base == "seen" else base
    refused(program, "must be a tensor that owns memory")


@pytest.mark.parametrize(
    ("shape", "strides", "offset"),
    [
        ((3, 4), (4, 1), 1),
        ((3, 4), (4, 1), -1),
        ((4, 4), (4, 1), 0),
        ((3, 4), (5, 1), 0),
        ((2, 2), (2**62, 1), 0),
        ((2**40, 2), (2**40, 1), 0),
    ],
    ids=str,
)
def test_a_view_that_reaches_outside(program, shape, strides, offset):
    program.graph.add_view(program.w, shape, strides, offset)
    refused(program, "reaches outside of its base 'w'")


def test_a_view_that_goes_backwards(program):
    program.graph.add_view(program.w, (3, 4), (4, -1), 3)
    refused(program, "has a negative stride")


@pytest.mark.parametrize("offset", [12, 13])
def test_an_empty_view_may_lie_anywhere(program, offset):
    # (PyTorch's may have an offset outside of the memory)
    program.graph.add_view(program.w, (0, 4), (4, 1), offset)
    program.verify()


def test_a_view_of_another_element_type(program):
    program.seen.dtype = torch.float16
    refused(program, "another dtype than its base")


@pytest.mark.parametrize("offset", [0, 1])
def test_complex_numbers_may_be_viewed_as_pairs_within_their_memory(offset):
    graph = Graph()
    z = graph.add_tensor(TensorKind.INPUT, torch.complex64, (3,), name="z")
    pairs = graph.add_view(z, (3, 2), (2, 1), offset, dtype=F32)
    y = graph.add_tensor(TensorKind.VALUE, F32, (3, 2), name="y")
    graph.add_op("map", [pairs], [y], RELU, phase=Phase.FORWARD, name="y")
    if offset == 0:
        verify(graph)
        return
    with pytest.raises(InternalError, match="reaches outside of its base 'z'"):
        verify(graph)


def test_pairs_may_be_viewed_as_complex_numbers_within_their_memory():
    graph = Graph()
    x = graph.add_tensor(TensorKind.INPUT, F32, (5,), name="x")
    z = graph.add_tensor(TensorKind.VALUE, torch.complex64, (2,), name="z")
    copied = graph.add_view(x, (2,), (1,), 0, dtype=torch.complex64)
    graph.add_op("copy", [copied], [z], phase=Phase.FORWARD, name="z")
    verify(graph)
    copied.shape = (3,)
    with pytest.raises(InternalError, match="reaches outside of its base 'x'"):
        verify(graph)


def test_elementwise_codelets_take_no_complex_numbers():
    graph = Graph()
    z = graph.add_tensor(TensorKind.INPUT, torch.complex64, (3,), name="z")
    y = graph.add_tensor(TensorKind.VALUE, F32, (3,), name="y")
    graph.add_op("map", [z], [y], RELU, phase=Phase.FORWARD, name="y")
    with pytest.raises(InternalError, match="input 0 is real"):
        verify(graph)


def verify(graph: Graph) -> None:
    with _native.translated_errors():
        to_native(graph).verify()


# --- Ops and the table ---


def test_a_kind_that_does_not_exist(program):
    program.map.kind = "maps"
    refused(program, "no op named 'maps'")


@pytest.mark.parametrize("operands", ["inputs", "outputs"])
def test_an_id_of_no_tensor(program, operands):
    getattr(program.map, operands)[0] = 99
    refused(program, "uses tensor 99, which does not exist")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda op: op.inputs.pop(), "the op has 2 inputs instead of 1"),
        (lambda op: op.inputs.append(1), "input 2 broadcasts to (2, 4)"),
        (lambda op: op.inputs.extend([1, 1, 1]), "the op has 4 inputs instead of 5"),
        (lambda op: op.inputs.__setitem__(0, -1), "input 0 'a' is present"),
        (lambda op: op.outputs.clear(), "the op has 1 outputs instead of 0"),
        (lambda op: op.outputs.__setitem__(0, -1), "output 0 '' is present"),
        (lambda op: op.outputs.append(2), "the op has 1 outputs instead of 2"),
        (lambda op: op.inputs.reverse(), "a has as many columns as b has rows"),
        (lambda op: op.attributes.update(alpha=1), "attribute 'alpha' is a float"),
        (lambda op: op.attributes.update(partials="full"), "attribute 'partials' allows 'full'"),
        (lambda op: op.attributes.update(beta2=0.5), "the op has an attribute 'beta2'"),
    ],
)
def test_an_op_that_does_not_fit_its_schema(program, change, problem):
    change(program.product)
    refused(program, problem)


def test_an_attribute_that_is_missing(program):
    del program.map.attributes["code"]
    refused(program, "attribute 'code' is given")


def test_an_output_of_another_type_than_the_rule_gives(program):
    program.z.shape, program.z.strides = (4, 2), (2, 1)
    refused(program, "output 0 is float32(4, 2), its shape rule gives float32(2, 4)")


def test_an_input_of_another_element_type(program):
    program.scalar.dtype = torch.float16
    refused(program, "input 2 'weight_decay_scale_factor0' is not float16")


# --- Memory of operands ---


def test_an_output_over_an_input(program):
    square = program.add(TensorKind.VARIABLE, (3, 3), "square")
    turned = program.graph.add_view(square, (3, 3), (1, 3), 0)
    program.graph.ops.insert(0, program.op("copy", [turned], [square]))
    program.graph.ops.pop()
    refused(program, "shares memory with no other input or output of the op")


def test_a_map_may_write_over_what_it_reads(program):
    whole = program.graph.add_view(program.w, (3, 4), (4, 1), 0)
    program.op("map", [program.w], [whole], RELU, phase=Phase.UPDATE)
    program.graph.ops.remove(program.update)
    program.verify()
    whole.shape, whole.strides = (4, 3), (3, 1)
    refused(program, "")


def test_an_update_of_another_tensor(program):
    other = program.add(TensorKind.VARIABLE, (3, 4), "other")
    program.update.outputs = [other.id]
    refused(program, "output 0 is the same memory as input 0")


def test_an_output_with_elements_at_one_place(program):
    memory = program.add(TensorKind.VALUE, (4,), "memory")
    view = program.graph.add_view(memory, (3, 2), (1, 1), 0)
    program.graph.ops.insert(0, program.op("copy", [program.x], [view]))
    program.graph.ops.pop()
    view.shape = (2, 3)
    refused(program, "output 0 has its own place in memory for each value")


# --- Who writes what, and when ---


def test_a_value_read_before_it_is_written(program):
    program.graph.ops[:2] = program.graph.ops[1::-1]
    refused(program, "'matmul' (matmul), forward, stage 0, reads 'y' before it is written")


def test_phases_out_of_order(program):
    program.product.phase = Phase.UPDATE
    refused(program, "comes after a later phase")


@pytest.mark.parametrize("stage", [-1, 2**20])
def test_a_stage_that_there_cannot_be(program, stage):
    program.map.stage = stage
    refused(program, f"is on stage {stage}")


def test_a_value_written_twice(program):
    program.graph.ops.insert(1, program.op("map", [program.x], [program.y], RELU))
    program.graph.ops.pop()
    refused(program, "writes 'y' a second time")


@pytest.mark.parametrize("kind", [TensorKind.INPUT, TensorKind.CONSTANT])
def test_what_nothing_may_change(program, kind):
    program.y.kind = kind
    refused(program, "writes 'y' which no op may change")


def test_a_variable_is_written_on_one_stage_in_each_phase(program):
    whole = program.graph.add_view(program.w, (3, 4), (4, 1), 0)
    for op in program.graph.ops:
        op.stage = int(op.phase == Phase.BACKWARD)
    for _ in range(2):  # the program may write a variable several times
        op = program.op("copy", [program.g], [whole], phase=Phase.BACKWARD, stage=1)
        program.graph.ops.insert(3, program.graph.ops.pop())
    program.verify()
    program.graph.ops[4].stage = 0
    refused(program, "writes 'w' a second time")


@pytest.mark.parametrize("kind", [TensorKind.INPUT, TensorKind.VARIABLE])
def test_what_is_not_there_when_constants_are_computed(program, kind):
    program.map.phase = Phase.SETUP
    program.x.kind = TensorKind.CONSTANT
    program.verify()
    program.x.kind = kind
    refused(program, "'map' (map), setup, stage 0, reads 'x' before it is written")


def test_a_value_of_a_later_stage(program):
    program.map.stage = 1
    refused(program, "reads 'y' on a stage that runs before the one that writes it")
    program.product.stage = 1
    program.verify()


def test_the_backward_pass_runs_stages_downwards(program):
    end = program.add(TensorKind.VALUE, (3, 4), "end")
    last = program.op("map", [program.g], [end], RELU, phase=Phase.BACKWARD, stage=1)
    program.graph.ops.pop()
    program.graph.ops.insert(3, last)
    refused(program, "reads 'g' on a stage that runs before the one that writes it")
    program.gradient.stage = 1
    program.verify()


class Counter:
    """A program whose forward pass reads and changes a variable."""

    def __init__(self) -> None:
        self.program = Program()
        graph = self.program.graph
        self.count = self.program.add(TensorKind.VARIABLE, (2, 3), "count")
        whole = graph.add_view(self.count, (2, 3), (3, 1), 0)
        self.change = self.program.op("copy", [self.program.y], [whole])
        end = self.program.add(TensorKind.VALUE, (2, 3), "end")
        self.read = self.program.op("map", [self.count], [end], RELU)
        graph.ops[2:] = [self.read, self.change]


def test_a_variable_changed_on_the_stage_that_reads_it():
    counter = Counter()
    counter.program.verify(in_flight=True)


def test_a_variable_read_behind_its_change():
    counter = Counter()
    counter.read.stage = 1
    refused(counter.program, "writes 'count' before a later stage reads the old value")


def test_a_variable_read_on_another_stage_of_a_pipeline():
    counter = Counter()
    counter.change.stage = 1
    counter.program.verify()
    refused(counter.program, "where other micro-batches may have changed it", in_flight=True)


def test_a_print_writes_nothing(program):
    seen = program.graph.add_view(program.y, (2, 3), (3, 1), 0)
    attributes = {
        **{name: "t" for name in ("title", "separator", "open_bracket", "close_bracket")},
        **{"summarise_threshold": 1, "edge_items": 1, "max_line_width": 1, "digits": 1},
        "float_format": "auto",
    }
    program.graph.ops.insert(1, program.op("print", [program.y], [seen], attributes))
    program.graph.ops.pop()
    program.verify()
    seen.offset, seen.shape = 1, (1, 3)
    refused(program, "output 0")
