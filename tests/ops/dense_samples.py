"""Samples of matrix products and convolutions."""

from typing import Any

import torch

from tests.ops.sample import F16, F32, F64, Sample, channels_last, columns


def matmul(name: str, a: Any, b: Any, out: Any, *more: Any, **attributes: Any) -> Sample:
    """Return a matrix product."""
    dtypes = attributes.pop("dtypes", (F32, F16))
    return Sample("matmul", name, [a, b, *more], [out], attributes, dtypes)


MATMULS = [
    matmul("rows", (300, 520), (520, 300), (300, 300)),
    matmul("columns", columns(300, 520), columns(520, 300), (300, 300)),
    matmul("deep", columns(96, 20000), (20000, 80), (96, 80)),
    matmul("wide", (70, 64), (64, 5000), (70, 5000), (5000,)),
    matmul("short", (32, 784), columns(784, 320), (32, 320), (320,), activation="relu"),
    matmul("short_depth", columns(784, 32), (32, 320), (784, 320)),
    matmul("masked", (256, 300), (300, 200), (256, 200), None, (256, 200)),
    matmul("scaled", (200, 300), (300, 200), (200, 200), (200, 200), alpha=0.5, beta=2.0),
    matmul("row", (1, 1500), (1500, 900), (1, 900), (900,)),
    matmul("row_of_columns", (1, 1500), columns(1500, 900), (1, 900)),
    matmul("column", (900, 1500), (1500, 1), (900, 1), (1,)),
    matmul("column_of_columns", columns(900, 1500), (1500, 1), (900, 1)),
    matmul("batch", (7, 130, 90), (7, 90, 170), (7, 130, 170)),
    matmul("small_batch", (70, 30, 20), (70, 20, 40), (70, 30, 40)),
    matmul("shared", (5, 130, 90), (1, 90, 170), (5, 130, 170)),
    matmul("half_sums", columns(200, 300), (300, 200), (200, 200), partials="half", dtypes=(F16,)),
    matmul("two_parts", (300, 520), (520, 300), (300, 300), dtypes=(F32,), precision="tf32"),
    matmul("one_part", (300, 520), (520, 300), (300, 300), dtypes=(F32,), precision="bf16"),
    matmul("double", (300, 2000), (2000, 300), (300, 300), dtypes=(F64,)),
    Sample(
        "sgd_product_update",
        "short",
        [(300, 200), (300, 64), (64, 200), torch.tensor(0.9), torch.tensor(0.1)],
        [0, (300, 200)],
        dtypes=(F32,),
    ),
    Sample(
        "sgd_product_update",
        "packed",
        [(300, 200), columns(300, 700), (700, 200), torch.tensor(0.9), torch.tensor(0.1)],
        [0, (300, 200)],
        dtypes=(F32,),
    ),
]


def convolutions(
    name: str,
    x: tuple[int, ...],
    weight: tuple[int, ...],
    *,
    stride: int = 1,
    padding: int = 0,
    transposed: bool = False,
    groups: int = 1,
    last: bool = True,
    dtypes: tuple[torch.dtype, ...] = (F32, F16),
    **attributes: Any,
) -> list[Sample]:
    """Return a convolution, and the gradients of its input, and of its weight and bias."""
    rank = len(x) - 2
    geometry = {
        "stride": [stride] * rank,
        "padding": [padding] * rank,
        "dilation": [1] * rank,
        "output_padding": [0] * rank,
        "transposed": transposed,
        "groups": groups,
        **attributes,
    }
    meta = [torch.empty(shape, device="meta") for shape in (x, weight)]
    y = tuple(
        torch.convolution(
            *meta, None, *([v] * rank for v in (stride, padding, 1)), transposed, [0] * rank, groups
        ).shape
    )
    image = channels_last if last else lambda *shape: shape
    bias = (y[1],)
    inputs = [image(*y), image(*x)]
    return [
        Sample("convolution", name, [image(*x), weight, bias], [y], geometry, dtypes),
        Sample(
            "convolution_grad_input",
            name,
            [image(*y), weight],
            [x],
            {**geometry, "input_shape": list(x)},
            dtypes,
        ),
        Sample(
            "convolution_grad_weight",
            name,
            inputs,
            [weight],
            {**geometry, "weight_shape": list(weight)},
            dtypes,
        ),
    ]


CONVOLUTIONS = [
    *convolutions("blocks", (9, 32, 18, 18), (48, 32, 3, 3), padding=1),
    *convolutions("one_image", (1, 64, 40, 40), (64, 64, 3, 3), padding=1),
    *convolutions("channels_first", (5, 32, 20, 20), (32, 32, 3, 3), last=False),
    *convolutions("colours", (2, 3, 96, 96), (64, 3, 7, 7), stride=2, padding=3),
    *convolutions("pointwise", (4, 96, 14, 14), (160, 96, 1, 1)),
    *convolutions("groups", (6, 32, 28, 28), (32, 8, 3, 3), padding=1, groups=4),
    *convolutions("depthwise", (8, 32, 28, 28), (32, 1, 3, 3), padding=1, groups=32),
    *convolutions("deep_depthwise", (3, 40, 8, 12, 14), (40, 1, 3, 3, 3), padding=1, groups=40),
    *convolutions("line", (6, 40, 900), (50, 40, 5)),
    *convolutions("volume", (2, 16, 12, 14, 16), (24, 16, 3, 3, 3), stride=2, padding=1),
    *convolutions(
        "transposed", (4, 32, 14, 14), (32, 24, 4, 4), stride=2, transposed=True, last=False
    ),
    *convolutions("half_sums", (4, 32, 14, 14), (40, 32, 3, 3), dtypes=(F16,), partials="half"),
    *convolutions(
        "one_part", (1, 64, 40, 40), (64, 64, 3, 3), padding=1, dtypes=(F32,), precision="bf16"
    ),
    *convolutions("double", (3, 16, 20, 20), (24, 16, 3, 3), dtypes=(F64,), last=False),
]
