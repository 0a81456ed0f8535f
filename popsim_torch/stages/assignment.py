"""``set_pipeline_stage_assignment`` and related functions: a stage for each layer of a model.

An assignment is stored in forward pre-hooks: one on each layer, which begins the stage when the
layer is called in a trace, and one on the model, which has the list of layers at the time of the
assignment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from popsim_torch.errors import Error, UsageTypeError, UsageValueError, closest_names
from popsim_torch.private_torch.module_parts import forward_pre_hooks, own_modules
from popsim_torch.stages.blocks import block_listener
from popsim_torch.stages.layers import PipelineStageRecord, layer_records, leaves
from popsim_torch.stages.pipeline_stage import (
    checked_stage,
    mark_stage,
    stage_mark,
    unmark_stage,
)

__all__ = [
    "assigned_stages",
    "get_pipeline_stage_assignment",
    "num_assignments",
    "reset_pipeline_stage_assignment",
    "set_pipeline_stage_assignment",
]

_SET = "set_pipeline_stage_assignment"

_changes = [0]


def num_assignments() -> int:
    """Return how often assignments have changed in this process."""
    return _changes[0]


def assigned_stages(model: nn.Module) -> list[tuple[str, int]]:
    """Return the stages that are stored on layers of a model, with the layers' names.

    Args:
        model: The model.
    """
    marks = ((name, stage_mark(layer)) for name, layer in model.named_modules())
    return [(name, mark.stage) for name, mark in marks if mark is not None]


class _AssignedLayers:
    """The forward pre-hook of a model with an assignment; has the layers of the assignment."""

    def __init__(self, records: Sequence[PipelineStageRecord]) -> None:
        self.layers = [(record.name, record.layer) for record in leaves(records)]

    def __call__(self, model: nn.Module, *_: object) -> None:
        """Check the layers when the model is traced."""
        if block_listener.get() is not None:
            self.check(model, "the pipeline stages of this model")

    def is_opened(self, name: str) -> bool:
        """Whether layers inside of a layer have their own stages."""
        return any(inner.startswith(f"{name}.") for inner, _ in self.layers)

    def check(self, model: nn.Module, where: str) -> None:
        """Raise an error if the layers of the model have changed."""
        records = layer_records(model, lambda name, layer: self.is_opened(name) and _has(layer))
        now = [(record.name, record.layer) for record in leaves(records)]
        if len(now) == len(self.layers) and all(
            name == before and layer is known
            for (name, layer), (before, known) in zip(now, self.layers, strict=True)
        ):
            return
        known = {id(layer) for _, layer in self.layers}
        present = {id(layer) for _, layer in now}
        changes = [f"'{name}' is new" for name, layer in now if id(layer) not in known]
        changes += [f"'{name}' is gone" for name, layer in self.layers if id(layer) not in present]
        what = ", ".join(changes[:3]) or "their order has changed"
        raise Error(
            f"{where}: the layers of {type(model).__name__} have changed since their stages were "
            f"set: {what}. Call {_SET} again, or reset_pipeline_stage_assignment."
        )


def _has(layer: nn.Module) -> bool:
    return any(inner is not None for inner in own_modules(layer).values())


def _assignment(model: nn.Module) -> _AssignedLayers | None:
    hooks = forward_pre_hooks(model).values()
    return next((hook for hook in hooks if isinstance(hook, _AssignedLayers)), None)


def _checked_model(function: str, model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        inner = getattr(model, "model", None)
        if not isinstance(inner, nn.Module):
            raise UsageTypeError(
                f"{function}: got a {type(model).__name__}. Pass a torch.nn.Module, or the result "
                "of trainingModel or inferenceModel."
            )
        model = inner
    if not _has(model):
        raise UsageValueError(
            f"{function}: {type(model).__name__} has no layers. Pass a model whose layers are "
            "modules."
        )
    return model


def set_pipeline_stage_assignment(model: nn.Module, assignment: Any) -> None:
    """Assign each layer of a model to a stage of a pipeline.

    The layers of a model are its modules in the order in which they were registered
    (``named_children``); for ``nn.Sequential`` this is the order of execution. If another model
    calls its layers so that the stages are not in ascending order, compiling it raises an error. A
    stage begins when its layer is called, and lasts until the next one begins; inside of a
    ``PipelineStage``, that stage is used instead. Without an executor the stages have no effect.

    A compiled executor of the model compiles again at its next call, and keeps its weights,
    optimizer state and random numbers.

    Args:
        model: The model, or an executor of it.
        assignment: One of

            * a list with an int for each layer: the first is 0, each next one is the same or one
              more. For a layer that has layers, such as a nested ``nn.Sequential``, the entry may
              be a list for these layers.
            * the records of ``get_pipeline_stage_assignment``, edited.
            * a dict of stages by name, with patterns such as ``"encoder.*"``: each pattern moves
              the layers that it matches and all layers inside of them, and overrides earlier
              patterns.

    Raises:
        UsageTypeError: ``assignment`` is not a list or dict, or a stage is not an int.
        UsageValueError: The assignment breaks one of the rules; the message names the rule and the
            layer. In this case nothing has changed.
    """
    model = _checked_model(_SET, model)
    if isinstance(assignment, Mapping):
        records = _by_names(model, assignment)
    elif not isinstance(assignment, list):
        raise UsageTypeError(
            f"{_SET}: the assignment is a {type(assignment).__name__}. Pass a list with one stage "
            "for each layer, a list of records, or a dict of stages by name."
        )
    elif any(isinstance(item, PipelineStageRecord) for item in assignment):
        records = _by_records(model, assignment)
    else:
        records = _by_list(type(model).__name__, layer_records(model, _never), assignment)
    _check_shared(records)
    _clear(model)
    for record in leaves(records):
        assert record.stage is not None
        mark_stage(record.layer, record.stage)
    model.register_forward_pre_hook(_AssignedLayers(records))
    _changes[0] += 1


def get_pipeline_stage_assignment(model: nn.Module) -> list[PipelineStageRecord]:
    """Return a record for each layer of a model, to read, or to edit and set again.

    Args:
        model: The model, or an executor of it.

    Returns:
        Records in the order of the layers. A layer without a stage has None. Nested models have
            nested records: each ``nn.Sequential``, and each layer whose layers have their own
            stages.

    Raises:
        Error: The layers have changed since the stages were set.
    """
    model = _checked_model("get_pipeline_stage_assignment", model)
    assignment = _assignment(model)
    if assignment is not None:
        assignment.check(model, "get_pipeline_stage_assignment")
    return layer_records(model, _is_model)


def reset_pipeline_stage_assignment(model: nn.Module) -> None:
    """Remove the stages of all layers of a model, including those in which they were built.

    Args:
        model: The model, or an executor of it, which compiles again at its next call.
    """
    _clear(_checked_model("reset_pipeline_stage_assignment", model))
    _changes[0] += 1


def _clear(model: nn.Module) -> None:
    for layer in model.modules():
        unmark_stage(layer)
        hooks = forward_pre_hooks(layer)
        for key in [key for key, hook in hooks.items() if isinstance(hook, _AssignedLayers)]:
            del hooks[key]


def _never(_name: str, _layer: nn.Module) -> bool:
    return False


def _is_model(_name: str, layer: nn.Module) -> bool:
    """Whether a layer is shown as a nested model."""
    if not _has(layer):
        return False
    marked = any(stage_mark(inner) for inner in layer.modules() if inner is not layer)
    return isinstance(layer, nn.Sequential) or marked


# The forms of an assignment: list, records, names


def _by_list(
    of: str, records: list[PipelineStageRecord], stages: Sequence[object], last: int = -1
) -> list[PipelineStageRecord]:
    """Fill records with the stages of a list; ``last`` is the stage before them."""
    if len(stages) != len(records):
        raise UsageValueError(
            f"{_SET}: {len(stages)} stages for the {len(records)} layers of {of}: "
            f"{_shown([record.name for record in records])}. Pass one stage for each layer."
        )
    for record, stage in zip(records, stages, strict=True):
        if isinstance(stage, list):
            if not _has(record.layer):
                raise UsageValueError(
                    f"{_SET}: layer {_of(record)} has no layers, but its entry is a list. Pass an "
                    "int."
                )
            inner = layer_records(record.layer, _never, f"{record.name}.")
            record.nested = _by_list(f"layer {_of(record)}", inner, stage, last)
        else:
            record.stage = _checked_step(record, stage, last)
        for leaf in leaves([record]):
            assert leaf.stage is not None
            last = leaf.stage
    return records


def _checked_step(record: PipelineStageRecord, stage: object, last: int) -> int:
    number = checked_stage(f"{_SET}: layer {_of(record)}", stage)
    if last < 0 and number != 0:
        raise UsageValueError(
            f"{_SET}: layer {_of(record)} is the first and has stage {number}. The first stage is "
            "0."
        )
    if last >= 0 and number not in (last, last + 1):
        raise UsageValueError(
            f"{_SET}: layer {_of(record)} has stage {number} after a layer of stage {last}. Each "
            f"stage is the one before or one more: {last} or {last + 1}."
        )
    return number


def _by_records(model: nn.Module, given: Sequence[object]) -> list[PipelineStageRecord]:
    for item in given:
        if not isinstance(item, PipelineStageRecord):
            raise UsageTypeError(
                f"{_SET}: {item!r} is among the records. Pass only the records of "
                "get_pipeline_stage_assignment, or one int for each layer."
            )
    records = [item for item in given if isinstance(item, PipelineStageRecord)]
    opened = set(_nested_names(records))
    expected = layer_records(model, lambda name, layer: name in opened and _has(layer))
    wanted, found = list(leaves(expected)), list(leaves(records))
    for place, record in enumerate(wanted):
        if place >= len(found) or found[place].layer is not record.layer:
            raise UsageValueError(
                f"{_SET}: there is no record of layer {_of(record)} in its place. Pass the records "
                "of get_pipeline_stage_assignment, all of them and in their order."
            )
    if len(found) > len(wanted):
        raise UsageValueError(
            f"{_SET}: the record of {_of(found[len(wanted)])} belongs to no layer of "
            f"{type(model).__name__}. Leave it out."
        )
    last = -1
    for record, own in zip(wanted, found, strict=True):
        if own.stage is None:
            raise UsageValueError(
                f"{_SET}: layer {_of(record)} has no stage. Set the stage of its record."
            )
        last = _checked_step(record, own.stage, last)
        record.stage = last
    return expected


def _nested_names(records: Sequence[PipelineStageRecord]) -> Iterator[str]:
    """Yield the names of the nested models among records."""
    for record in records:
        if record.nested:
            yield record.name
            yield from _nested_names(record.nested)


def _by_names(model: nn.Module, stages: Mapping[Any, Any]) -> list[PipelineStageRecord]:
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    stage_of: dict[str, int] = {}
    for pattern, stage in stages.items():
        if not isinstance(pattern, str):
            raise UsageTypeError(
                f"{_SET}: the key {pattern!r} is not a string. Pass layers' names."
            )
        number = checked_stage(f"{_SET}: '{pattern}'", stage)
        matches = {name for name in names if fnmatchcase(name, pattern)}
        if not matches:
            close = closest_names(pattern, names)
            hint = f" Closest name: '{close[0]}'." if close else ""
            raise UsageValueError(
                f"{_SET}: '{pattern}' matches no layer of {type(model).__name__}.{hint}"
            )
        for name in names:
            if name in matches or any(around in matches for around in _around(name)):
                stage_of[name] = number
    used = sorted(set(stage_of.values()))
    if used != list(range(len(used))):
        raise UsageValueError(
            f"{_SET}: layers have the stages {_shown(used)}. Stages are numbered from 0 without a "
            "gap."
        )
    return _filled(model, stage_of)


def _around(name: str) -> Iterator[str]:
    """Yield the names of the modules that contain a module."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _filled(model: nn.Module, stage_of: Mapping[str, int]) -> list[PipelineStageRecord]:
    """Return records with the stages of names, nested if stages inside of a layer differ."""

    def is_nested(name: str, layer: nn.Module) -> bool:
        inner = (stage for other, stage in stage_of.items() if other.startswith(f"{name}."))
        return _has(layer) and any(stage != stage_of.get(name) for stage in inner)

    records = layer_records(model, is_nested)
    for record in leaves(records):
        record.stage = stage_of.get(record.name)
        if record.stage is None:
            raise UsageValueError(
                f"{_SET}: no pattern matches layer {_of(record)}. Each layer needs a stage; '*' as "
                "the first pattern gives one to all others."
            )
    return records


def _check_shared(records: Sequence[PipelineStageRecord]) -> None:
    """Refuse a layer that is in two places with two different stages."""
    seen: dict[int, PipelineStageRecord] = {}
    for record in leaves(records):
        other = seen.setdefault(id(record.layer), record)
        if other.stage != record.stage:
            raise UsageValueError(
                f"{_SET}: the layers '{other.name}' and '{record.name}' are one "
                f"{type(record.layer).__name__}, and have the stages {other.stage} and "
                f"{record.stage}. Give both places one stage, or make a second layer."
            )


def _of(record: PipelineStageRecord) -> str:
    return f"'{record.name}' ({type(record.layer).__name__})"


def _shown(items: Sequence[object]) -> str:
    text = ", ".join(map(str, items[:8]))
    return f"{text}, ..." if len(items) > 8 else text
