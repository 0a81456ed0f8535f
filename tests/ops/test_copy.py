"""The copy op, run on the device: the same bits in another layout."""

import pytest
import torch

from popsim_torch import _native, ir
from popsim_torch.passes.native_graph import to_native
from tests.ops.one_op import LAYOUTS, dtype_name, run_op

DTYPES = [torch.bool, torch.int16, torch.bfloat16, torch.float32, torch.int64]
VIEWS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.transpose(-1, -2),
    "heads": lambda x: x.transpose(1, 2),
    "heads_transposed": lambda x: x.permute(0, 2, 3, 1),
    "channels_last": lambda x: x.permute(0, 3, 1, 2),
    "outer": lambda x: x.transpose(0, 3),
    "reversed": lambda x: x.permute(3, 2, 1, 0),
    "part": lambda x: x[:, 1:, :, 2:5],
    "sparse": lambda x: x[:, ::2, :, ::3],
    "repeated_rows": lambda x: x[:, :1].expand(-1, 5, -1, -1),
    "repeated_columns": lambda x: x[..., :1].expand(-1, -1, -1, 5),
    "one": lambda x: x[:1, :1, :1, :1],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("shape", [(3, 5, 7, 11), (2, 33, 4, 48), (1, 70, 1, 96)], ids=str)
def test_layouts(shape, dtype, layout):
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 100, shape, generator=generator).to(dtype)
    for name, view in VIEWS.items():
        source = view(layout(x))
        (copy,) = run_op("copy", [source], [(dtype, source.shape)])
        assert torch.equal(copy, source), name


def test_bits_are_kept():
    x = torch.tensor([0x7FA00001, -0x80000000, 0x7F800000, 0x00000001], dtype=torch.int32)
    x = x.repeat(32, 8).view(torch.float32).t()
    (copy,) = run_op("copy", [x], [(torch.float32, x.shape)])
    assert torch.equal(copy.view(torch.int32), x.contiguous().view(torch.int32))


def test_between_element_types():
    x = torch.arange(12.0).view(3, 4).t()
    (copy,) = run_op("copy", [x], [(torch.int64, (4, 3))], dtype="int64")
    assert torch.equal(copy, x.long())


@pytest.mark.parametrize(("strides", "offset"), [((1, 20), 0), ((25, 1), 3), ((40, 2), 1)], ids=str)
def test_into_a_view(strides, offset):
    """What lies between the elements of the target stays as it is."""
    x = torch.arange(340.0).view(17, 20)
    graph = ir.Graph()
    source = graph.add_tensor(ir.TensorKind.VARIABLE, x.dtype, x.shape)
    memory = graph.add_tensor(ir.TensorKind.VARIABLE, x.dtype, (1000,))
    view = graph.add_view(memory, (17, 20), strides, offset)
    graph.add_op("copy", [source], [view], phase=ir.Phase.FORWARD, name="it")
    executable = _native.Executable(to_native(graph), _native.RunConfig(1, 1, False, "sequential"))
    executable.write(source.id, x)
    executable.write(memory.id, torch.full((1000,), -1.0))
    executable.load()
    executable.run([])
    expected = torch.full((1000,), -1.0)
    expected.as_strided((17, 20), strides, offset).copy_(x)
    assert torch.equal(executable.read(memory.id), expected)
