"""The ops embedding and embedding_grad, run on the device, against PyTorch."""

import pytest
import torch

from popsim_torch.errors import Error
from tests.ops.one_op import LAYOUTS, dtype_name, run_op

TOLERANCES = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def sample(shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("numbers", [torch.int32, torch.int64], ids=dtype_name)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=dtype_name)
@pytest.mark.parametrize(("rows", "width", "shape"), [(7, 5, (3, 4)), (900, 130, (2000,))], ids=str)
def test_against_float64(rows, width, shape, dtype, numbers, layout):
    table = sample((rows, width), dtype)
    generator = torch.Generator().manual_seed(2)
    indices = layout(torch.randint(0, rows, shape, generator=generator).to(numbers))
    (out,) = run_op("embedding", [table, indices], [(dtype, (*shape, width))])
    assert torch.equal(out, table[indices.long()])

    gradient = layout(sample((*shape, width), dtype))
    for padding in (-1, 3):
        (for_table,) = run_op(
            "embedding_grad",
            [gradient, indices],
            [(dtype, (rows, width))],
            rows=rows,
            padding_index=padding,
        )
        expected = torch.ops.aten.embedding_dense_backward(
            gradient.double(), indices.long(), rows, padding, False
        )
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(
            for_table.double(), expected, rtol=tolerance, atol=10 * tolerance
        )


@pytest.mark.parametrize("index", [-1, 7])
def test_indices_out_of_range(index):
    indices = torch.tensor([0, index, 6])
    with pytest.raises(Error, match=f"index {index} is out of range: the table has 7 rows"):
        run_op("embedding", [sample((7, 5), torch.float32), indices], [(torch.float32, (3, 5))])
    with pytest.raises(Error, match=f"index {index} is out of range"):
        run_op(
            "embedding_grad",
            [sample((3, 5), torch.float32), indices],
            [(torch.float32, (7, 5))],
            rows=7,
            padding_index=-1,
        )
