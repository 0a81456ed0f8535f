"""Models of images with published rates: ResNet-50, and the CNN of a tutorial; without weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache

import torch
from torch import nn

from popsim_torch import ops
from popsim_torch.estimates import estimate, model_request
from popsim_torch.executor.compile import compile_program
from popsim_torch.executor.estimating import compilation_request
from popsim_torch.machine import Estimate, EstimateRequest, estimate_program
from popsim_torch.optim import SGD
from popsim_torch.options import Options

__all__ = ["estimate_loading", "estimate_resnet", "estimate_resnet_inference"]

_C600_CLOCK = 1.486e9
"""Hz; follows from the rate of products on the data sheet of the C600 board."""
_BLOCKS = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Of each part of ResNet-50: channels, blocks, stride."""


class _Bottleneck(nn.Module):
    def __init__(self, inside: int, channels: int, stride: int) -> None:
        super().__init__()
        out = 4 * channels
        self.body = nn.Sequential(
            nn.Conv2d(inside, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.side: nn.Module = nn.Identity()
        if stride != 1 or inside != out:
            self.side = nn.Sequential(
                nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.side(x))


def _bottlenecks() -> Iterator[nn.Module]:
    inside = 64
    for channels, count, stride in _BLOCKS:
        for number in range(count):
            yield _Bottleneck(inside, channels, stride if number == 0 else 1)
            inside = 4 * channels


class _ResNet50(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        self.body = nn.Sequential(*_bottlenecks())
        self.head = nn.Linear(2048, 1000)

    def forward(self, images: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x: torch.Tensor = self.head(self.body(self.stem(images)).mean((2, 3)))
        if labels is None:
            return x
        loss = nn.functional.cross_entropy(x.float(), labels)
        marked: torch.Tensor = ops.identity_loss(loss, "none")
        return marked


@cache
def _resnet_request(micro_batch: int) -> EstimateRequest:
    """Return the request to estimate training in half precision on two Bow IPUs."""
    with torch.device("meta"):
        model = _ResNet50().half()
    replicas = accumulation = 2
    options = Options().enableSyntheticData(True).replicationFactor(replicas)
    options.Precision.setPartialsType(torch.half)
    options.machine("bow", out_of_memory="ignore")
    options.Training.gradientAccumulation(accumulation)
    options.setAvailableMemoryProportion({"IPU0": 0.16})
    options._Popart.set("autoRecomputation", 1)
    items = micro_batch * accumulation * replicas
    images = torch.empty(items, 3, 224, 224, dtype=torch.half, device="meta")
    labels = torch.empty(items, dtype=torch.int32, device="meta")
    optimizer = SGD(
        model.parameters(),
        lr=0.1,
        momentum=0.9,
        accum_type=torch.half,
        use_combined_accum=True,
    )
    request = model_request("estimate", model, (images, labels), None, options, optimizer)
    return compilation_request(compile_program(request))


def estimate_resnet(replicas: int, micro_batch: int = 18, accumulation: int = 0) -> Estimate:
    """Return the estimate of training ResNet-50 in half precision, one replica on each Bow IPU.

    The images are made on the device: published runs overlap their transfer.

    Args:
        replicas: Copies of the model; more than one.
        micro_batch: Images of a micro-batch.
        accumulation: Micro-batches of an update; 0 for the published global batch.
    """
    request = _resnet_request(micro_batch)
    count = accumulation or max(57 * 16 // replicas, 1)
    loop = dataclasses.replace(
        request.run.loop, replicas=replicas, gradient_accumulation=count, input_groups=()
    )
    run = dataclasses.replace(request.run, loop=loop, num_ipus=replicas)
    return estimate_program(dataclasses.replace(request, run=run))


def estimate_resnet_inference() -> Estimate:
    """Return the estimate of ResNet-50 at batch 4 on a C600 board, in half precision."""
    with torch.device("meta"):
        model = _ResNet50().half().eval()
    iterations = 1000  # of a call, so that its beginning and end do not count
    options = Options().enableSyntheticData(True).deviceIterations(iterations)
    options.Precision.setPartialsType(torch.half)
    images = torch.empty(4 * iterations, 3, 224, 224, dtype=torch.half, device="meta")
    request = model_request("estimate", model, images, None, options, None)
    asked = compilation_request(compile_program(request))
    return estimate_program(dataclasses.replace(asked, clock=_C600_CLOCK))


class _Loading(nn.Module):
    """The CNN of the tutorial on data loading."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 5, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(5, 12, 5),
            nn.ReLU(),
            nn.GroupNorm(3, 12),
            nn.Flatten(),
            nn.Linear(41772, 100),
            nn.ReLU(),
            nn.Linear(100, 10),
        )

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = nn.functional.cross_entropy(self.body(images), labels)
        return loss


def estimate_loading(*, real: bool) -> Estimate:
    """Return the estimate of training the tutorial's CNN on one Mk2 IPU.

    Args:
        real: Whether the images come from the host.
    """
    with torch.device("meta"):
        model = _Loading()
    iterations, batch = 50, 16
    options = Options().deviceIterations(iterations).enableSyntheticData(not real)
    options.machine("ipu2", out_of_memory="ignore")
    images = torch.empty(iterations * batch, 1, 128, 128, device="meta")
    labels = torch.empty(iterations * batch, dtype=torch.int64, device="meta")
    optimizer = SGD(model.parameters(), lr=0.001, momentum=0.9, use_combined_accum=False)
    return estimate(model, (images, labels), options=options, optimizer=optimizer)
