"""The layers of a model, to which stages are assigned.

Package private: the public names are in ``assignment``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from popsim_torch.private_torch.module_parts import own_modules
from popsim_torch.stages.pipeline_stage import stage_mark

__all__ = ["PipelineStageRecord", "layer_records", "leaves"]


@dataclass
class PipelineStageRecord:
    """A layer and its stage; a nested model has the records of its own layers.

    Attributes:
        layer: The layer.
        name: Its name in the model, as in ``named_modules``.
        nested: The records of its layers, if it is a nested model.
    """

    layer: nn.Module
    name: str
    _stage: int | None = None
    nested: list[PipelineStageRecord] = field(default_factory=list)

    @property
    def stage(self) -> int | None:
        """The layer's stage, for a nested model that of its first layer; None if it has none.

        Setting it moves all layers of a nested model.
        """
        return self.nested[0].stage if self.nested else self._stage

    @stage.setter
    def stage(self, stage: int | None) -> None:
        self._stage = stage
        for record in self.nested:
            record.stage = stage

    def __repr__(self) -> str:
        kind = type(self.layer).__name__
        if not self.nested:
            return f"PipelineStageRecord({self.name!r}, {kind}, stage={self.stage})"
        return f"PipelineStageRecord({self.name!r}, {kind}, nested={self.nested!r})"


def layer_records(
    model: nn.Module,
    is_nested: Callable[[str, nn.Module], bool],
    prefix: str = "",
    stage: int | None = None,
) -> list[PipelineStageRecord]:
    """Return the records of a model's layers in the order of registration.

    Args:
        model: The model.
        is_nested: Called with a layer and its name; returns whether it is shown as a nested model.
        prefix: The model's name and a dot, if it has a name.
        stage: The stage of layers without their own stage.
    """
    records = []
    for name, layer in own_modules(model).items():
        if layer is None:
            continue
        path = prefix + name
        mark = stage_mark(layer)
        own = stage if mark is None else mark.stage
        nested = []
        if is_nested(path, layer):
            nested = layer_records(layer, is_nested, f"{path}.", own)
        records.append(PipelineStageRecord(layer, path, own, nested))
    return records


def leaves(records: Sequence[PipelineStageRecord]) -> Iterator[PipelineStageRecord]:
    """Yield the records that have their own stage, in order."""
    for record in records:
        if record.nested:
            yield from leaves(record.nested)
        else:
            yield record
