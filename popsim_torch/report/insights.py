"""Advice from an estimate: the largest tensors, stages and ops, and what a change would do.

The effect of a change is computed from the figures of the estimate, so it is simulated, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from popsim_torch.machine.figures import amount, percent, size, time
from popsim_torch.report.modules import OpCost

__all__ = ["Insight", "find_insights"]

_MANY = 5
_HALF_IS_FASTER = 4  # products of float16 against float32: 64 multiplications in place of 16
_SMALL = 0.005  # of a call; what saves less is not worth a change


@dataclass(frozen=True)
class Insight:
    """One of the largest tensors, stages or ops.

    Attributes:
        about: ``tensor``, ``stage`` or ``op``.
        name: The name of the tensor, stage or op.
        figure: How large it is, as text.
        advice: What to do about it.
        effect: The simulated effect of the advice.
    """

    about: str
    name: str
    figure: str
    advice: str
    effect: str


def find_insights(estimate: Mapping[str, Any], ops: Sequence[OpCost]) -> Iterator[Insight]:
    """Yield insights: five tensors, five stages, five ops, or as many as there are.

    Args:
        estimate: The estimate.
        ops: Its ops.
    """
    yield from _tensors(estimate, ops)
    yield from _stages(estimate, ops)
    yield from _ops(estimate, ops)


# --- Tensors ---


def _tensors(estimate: Mapping[str, Any], ops: Sequence[OpCost]) -> Iterator[Insight]:
    variables = [one for one in estimate["variables"] if one["class"] != "code"]
    for one in sorted(variables, key=lambda one: -one["bytes"] * one["copies"])[:_MANY]:
        recomputable = _is_recomputable(one, ops)
        advice, saved = _advice_for_tensor(estimate, one, recomputable)
        copies = f", {one['copies']} copies" if one["copies"] > 1 else ""
        shape = " x ".join(map(str, one["shape"])) or "scalar"
        yield Insight(
            about="tensor",
            name=one["name"] or _writer(estimate, ops, one),
            figure=(
                f"{size(one['bytes'] * one['copies'])} "
                f"({one['class']}, {shape} {one['dtype']}{copies})"
            ),
            advice=advice,
            effect=_memory_effect(estimate, ops, one, saved, recomputable),
        )


def _is_recomputable(variable: Mapping[str, Any], ops: Sequence[OpCost]) -> bool:
    """Return whether the forward pass writes a tensor, and a later pass reads it."""
    if variable["class"] not in ("activations", "stash"):
        return False
    first: int | None = variable["first_op"]
    last: int | None = variable["last_op"]
    if first is None or last is None:
        return bool(variable["class"] == "stash")
    return ops[first].phase == "forward" and ops[last].phase != "forward"


def _writer(estimate: Mapping[str, Any], ops: Sequence[OpCost], variable: Mapping[str, Any]) -> str:
    """Return the name of a tensor without one: by the op that writes it."""
    index = next(i for i, one in enumerate(estimate["variables"]) if one is variable)
    writers = [op.name for op in ops if index in op.outputs]
    return f"result of {writers[0]}" if writers else "(no name)"


def _advice_for_tensor(
    estimate: Mapping[str, Any], variable: Mapping[str, Any], recomputable: bool
) -> tuple[str, float]:
    """Return an advice, and the share of the tensor's bytes that it saves."""
    kind, is_float = variable["class"], variable["dtype"] == "float32"
    replicas = estimate["batch"]["replicas"]
    if recomputable:
        copies = max(variable["copies"], 1)
        if copies > 1:
            return (
                "Recompute it: a recomputationCheckpoint at the inputs of the stage keeps only "
                "those for the micro-batches in flight.",
                (copies - 1) / copies,
            )
        return "Recompute it in the backward pass, between recomputationCheckpoints.", 1.0
    if kind == "state":
        if replicas > 1:
            return (
                "Share it among the replicas: "
                "TensorLocationSettings.useReplicatedTensorSharding().",
                1 - 1 / replicas,
            )
        return "Keep it off the chip: TensorLocationSettings.useOnChipStorage(False).", 1.0
    if kind == "accumulators" and is_float:
        return "Accumulate in half: the optimizer's accum_type=torch.float16.", 0.5
    if kind == "temporaries":
        return (
            "Allow fewer bytes for products: Options.setAvailableMemoryProportion; they become "
            "slower.",
            0.5,
        )
    if is_float:
        return "Use float16: model.half(), or half() for this tensor.", 0.5
    if kind == "parameters":
        return "Move a part of the model to another IPU: poptorch.Block or BeginBlock.", 1.0
    return "Use a smaller micro-batch; more gradient accumulation keeps the batch.", 0.5


def _memory_effect(
    estimate: Mapping[str, Any],
    ops: Sequence[OpCost],
    variable: Mapping[str, Any],
    share: float,
    recomputable: bool,
) -> str:
    ipu = next((one for one in estimate["ipus"] if one["ipu"] == variable["ipu"]), None)
    if ipu is None:
        return ""
    saved = share * variable["bytes_per_tile"] * variable["copies"]
    memory = ipu["memory"]
    first, last, peak = variable["first_op"], variable["last_op"], memory["peak_op"]
    is_always = first is None or last is None
    if not is_always and (peak is None or not first <= peak <= last):
        text = f"No change of the peak of IPU {ipu['ipu']}: the tensor is not there then"
    else:
        now = f"{100 * saved / memory['peak']:.0f} % of the peak" if memory["peak"] else "of 0"
        text = f"{size(saved)} less on a tile of IPU {ipu['ipu']} ({now})"
    if recomputable:
        index = next(i for i, one in enumerate(estimate["variables"]) if one is variable)
        again = sum(op.call_cycles for op in ops if index in op.outputs and op.phase == "forward")
        text += f"; {amount(again)} cycles more in a call, if only its op is repeated"
    return f"{text} (simulated)"


# --- Stages ---


def _stages(estimate: Mapping[str, Any], ops: Sequence[OpCost]) -> Iterator[Insight]:
    cycles: dict[int, float] = {}
    for op in ops:
        if op.phase in ("forward", "backward"):
            cycles[op.stage] = cycles.get(op.stage, 0.0) + op.call_cycles
    if not any(cycles.values()):
        return
    largest = sorted(cycles, key=lambda stage: -cycles[stage])[:_MANY]
    mean, hertz = sum(cycles.values()) / len(cycles), estimate["device"]["clock_hz"]
    for stage in largest:
        if len(cycles) == 1:
            advice, effect = _advice_for_program(estimate)
        elif stage == largest[0]:
            saved = cycles[stage] - mean
            advice = "It sets the pace. Move modules to other stages, until all take equally long."
            effect = f"At most {time(saved / hertz)} less in a call, if all stages are equal"
        else:
            room = cycles[largest[0]] - cycles[stage]
            advice = f"It waits for stage {largest[0]}: move modules of that stage here."
            effect = f"Room for {amount(room)} cycles in a call without a slower pace"
        yield Insight(
            about="stage",
            name=f"stage {stage}",
            figure=f"{amount(cycles[stage])} cycles in a call",
            advice=advice,
            effect=f"{effect} (simulated)",
        )


def _advice_for_program(estimate: Mapping[str, Any]) -> tuple[str, str]:
    """Return an advice and its effect for a program with one stage: by the largest other part."""
    call, batch = estimate["call"], estimate["batch"]
    parts, total = call["parts"], call["cycles"] or 1.0
    update = parts["update"] + parts["all_reduce"]
    around = parts["sync"] + parts["glue"]
    if max(update, parts["host"], around) < _SMALL * total:
        return "Nothing but computing and exchange takes time.", "None"
    if update >= max(parts["host"], around) and estimate["training"]:
        twice = 2 * batch["gradient_accumulation"]
        return (
            f"Twice the gradient accumulation ({twice}): half as many weight updates for an item.",
            f"{percent(update / 2 / total)} less time for an item",
        )
    if parts["host"] >= around:
        return (
            "Smaller inputs (uint8, float16), or more device iterations: the host takes less part.",
            f"At most {percent(parts['host'] / total)} less time for an item",
        )
    return (
        "A larger micro-batch: sync and control code take the same time for more items.",
        f"{percent(around / 2 / total)} less time for an item with twice the micro-batch",
    )


# --- Ops ---


def _ops(estimate: Mapping[str, Any], ops: Sequence[OpCost]) -> Iterator[Insight]:
    total = sum(op.call_cycles for op in ops) or 1.0
    dtypes = [one["dtype"] for one in estimate["variables"]]
    timed = [op for op in ops if op.call_cycles]
    for op in sorted(timed, key=lambda op: -op.call_cycles)[:_MANY]:
        advice, saved = _advice_for_op(op, dtypes)
        where = f" in {op.module}" if op.module else ""
        effect = "No change that is simple to make"
        if saved:
            effect = f"At most {percent(saved * op.executions / total)} of all op cycles less"
        yield Insight(
            about="op",
            name=op.name,
            figure=(
                f"{amount(op.call_cycles, op.grade)} cycles in a call "
                f"({100 * op.call_cycles / total:.0f} %; {op.kind}{where}, {op.phase})"
            ),
            advice=advice,
            effect=f"{effect} (simulated)",
        )


def _advice_for_op(op: OpCost, dtypes: Sequence[str]) -> tuple[str, float]:
    """Return an advice, and the cycles that it saves in an execution."""
    if op.phase == "update":
        return "Twice the gradient accumulation: half as many updates for an item.", op.cycles / 2
    if op.recomputed:
        return "Keep its result: it is computed again in the backward pass.", op.cycles
    uses_float = any(dtypes[one] == "float32" for one in op.inputs)
    if op.compute >= 0.5 * op.cycles and uses_float and op.formula in ("matmul", "convolution"):
        return "Use float16 for its operands.", op.compute * (1 - 1 / _HALF_IS_FASTER)
    if op.exchange >= 0.4 * op.cycles:
        return (
            "Most of it moves data between tiles: larger products, or fewer changes of layout.",
            op.exchange / 2,
        )
    if op.sync + op.glue >= 0.4 * op.cycles:
        return (
            "Most of it is sync and control code: a larger micro-batch, or fewer, larger ops.",
            (op.sync + op.glue) / 2,
        )
    if op.grade == "C":
        return "Its formula is assumed: do not build on this figure alone.", 0.0
    return "Tiles compute most of the time: only less work would make it faster.", 0.0
