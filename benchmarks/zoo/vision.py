"""The families of torchvision: classification, segmentation, feature pyramids and video."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.zoo.entry import Batch, Entry

LABELS = 10


class Classifier(nn.Module):
    """A torchvision model with the loss of its training script.

    Args:
        body: Maps images to logits, or to logits and those of auxiliary classifiers.
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the logits and the loss."""
        logits = self.body(images)
        if isinstance(logits, torch.Tensor):
            return logits, F.cross_entropy(logits, labels)
        main, *others = (F.cross_entropy(part, labels) for part in logits if part is not None)
        return logits[0], main + 0.3 * sum(others)


class Segmenter(nn.Module):
    """A segmentation model with the loss of its training script."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the map of logits and the loss."""
        maps = self.body(images)
        loss = F.cross_entropy(maps["out"], labels)
        if "aux" in maps:
            loss = loss + 0.5 * F.cross_entropy(maps["aux"], labels)
        return maps["out"], loss


class Pyramid(nn.Module):
    """A backbone with a feature pyramid; the mean square of each level is its loss."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, images: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Return the levels by name, and the loss."""
        levels: Mapping[str, torch.Tensor] = self.body(images)
        total = torch.stack([level.square().mean() for level in levels.values()]).sum()
        return levels, torch.nn.functional.l1_loss(total, torch.zeros_like(total))


def _models() -> Any:
    from tutorials.common.torchvision_compat import import_torchvision

    import_torchvision()
    from torchvision import models

    return models


def _images(batch: int, size: tuple[int, ...], labels: tuple[int, ...] | None) -> Any:
    def make(generator: torch.Generator) -> Batch:
        result = {"images": torch.randn(batch, 3, *size, generator=generator)}
        if labels is not None:
            result["labels"] = torch.randint(LABELS, (batch, *labels), generator=generator)
        return result

    return make


def _entry(
    name: str,
    wrap: Callable[[nn.Module], nn.Module],
    make: Callable[[Any], nn.Module],
    batch: int,
    size: tuple[int, ...],
    labels: tuple[int, ...] | None = (),
    steps: int = 10,
) -> Entry:
    shape = "x".join(map(str, size))
    return Entry(
        name,
        "torchvision",
        lambda: wrap(make(_models())),
        _images(batch, size, labels),
        f"{batch} of {shape}",
        learning_rate=0.001,
        needs=("torchvision",),
        steps=steps,
    )


def _classifier(
    name: str, batch: int = 4, size: int = 64, steps: int = 10, **arguments: Any
) -> Entry:
    def make(models: Any) -> nn.Module:
        return getattr(models, name)(weights=None, num_classes=LABELS, **arguments)

    return _entry(name, Classifier, make, batch, (size, size), steps=steps)


def _segmenter(name: str, **arguments: Any) -> Entry:
    def make(models: Any) -> nn.Module:
        return getattr(models.segmentation, name)(
            weights=None, weights_backbone=None, num_classes=LABELS, **arguments
        )

    return _entry(name, Segmenter, make, 2, (64, 64), (64, 64))


def _pyramid(name: str, maker: str, backbone: str) -> Entry:
    def make(models: Any) -> nn.Module:
        from torchvision.models.detection import backbone_utils

        return getattr(backbone_utils, maker)(
            backbone_name=backbone, weights=None, trainable_layers=5
        )

    if maker == "mobilenet_backbone":

        def make(models: Any) -> nn.Module:
            from torchvision.models.detection import backbone_utils

            return backbone_utils.mobilenet_backbone(
                backbone_name=backbone, weights=None, fpn=True, trainable_layers=6
            )

    return _entry(name, Pyramid, make, 2, (64, 64), None)


def _video(name: str, size: tuple[int, int, int], steps: int = 10, **arguments: Any) -> Entry:
    def make(models: Any) -> nn.Module:
        return getattr(models.video, name)(weights=None, num_classes=LABELS, **arguments)

    return _entry(name, Classifier, make, 1, size, steps=steps)


ENTRIES = (
    _classifier("alexnet"),
    _classifier("vgg11", batch=2),
    _classifier("vgg11_bn", batch=2),
    _classifier("resnet18"),
    _classifier("resnet50"),
    _classifier("resnext50_32x4d"),
    _classifier("wide_resnet50_2"),
    _classifier("densenet121"),
    _classifier("googlenet", aux_logits=True, init_weights=False),
    _classifier("inception_v3", batch=2, size=299, steps=3, aux_logits=True, init_weights=False),
    _classifier("mobilenet_v2"),
    _classifier("mobilenet_v3_small"),
    _classifier("mobilenet_v3_large"),
    _classifier("shufflenet_v2_x1_0"),
    _classifier("squeezenet1_0"),
    _classifier("squeezenet1_1"),
    _classifier("mnasnet1_0"),
    _classifier("efficientnet_b0"),
    _classifier("efficientnet_v2_s"),
    _classifier("regnet_x_400mf"),
    _classifier("regnet_y_400mf"),
    _classifier("convnext_tiny"),
    _classifier("vit_b_16", image_size=64),
    _classifier("swin_t"),
    _classifier("swin_v2_t"),
    _classifier("maxvit_t", batch=1, size=224, steps=3),
    _segmenter("fcn_resnet50", aux_loss=True),
    _segmenter("deeplabv3_resnet50", aux_loss=True),
    _segmenter("deeplabv3_mobilenet_v3_large", aux_loss=True),
    _segmenter("lraspp_mobilenet_v3_large"),
    _pyramid("resnet18 with pyramid", "resnet_fpn_backbone", "resnet18"),
    _pyramid("mobilenet_v2 with pyramid", "mobilenet_backbone", "mobilenet_v2"),
    _video("r3d_18", (8, 32, 32), steps=3),
    _video("mc3_18", (8, 32, 32), steps=3),
    _video("r2plus1d_18", (8, 32, 32), steps=3),
    _video("s3d", (16, 224, 224), steps=1),
    _video("mvit_v2_s", (16, 224, 224), steps=1),
    _video("swin3d_t", (8, 64, 64), steps=3),
)
