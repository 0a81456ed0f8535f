"""All spellings of tensor names: no other file forms or parses a name.

Names are an interface, because programs anchor tensors by name. ``Tensor.role`` says what a tensor
*is*; its name is for people.
"""

from __future__ import annotations

import re
from typing import NamedTuple

LOSS_SCALE = "lossScaling_FLOAT"
"""The seed of the backward pass of a float32 loss."""
LOSS_SCALE_FACTOR = "lossScaleUpdateFactor"
"""The factor of the loss scale, if the device adapts the loss scale."""
FINAL_LOSS_SCALE = "finalLossScale"
"""The loss scale times that factor: the seed of the backward pass in this case."""
GLOBAL_NORM = "GlobalNorm___0"
"""The norm of all gradients together, if it is used to clip them."""

_SEPARATOR = "___"
_GRADIENT = f"Gradient{_SEPARATOR}"
_REBUILT = "__re"
_COUNTER = f"Counter{_SEPARATOR}_"
_OLD_PREFIX = "model."
_OUTER_SCOPE = "model/"
_GRADIENT_KEY = "_grad"
_INPUT = "input"
_WHOLE_MODEL = "(model)"
_OUTPUT_NUMBERS = re.compile(r"(?:\[[0-9]+\])?(?:/[0-9]+)?")
_PARTIAL_GRADIENT = re.compile(rf"{_GRADIENT}[0-9]+_[0-9]+")
_RESULT = re.compile(r"(?:(.+)/)?([^/:]+):([0-9]{1,9})(?:/([0-9]{1,9}))?", re.DOTALL)


class ResultParts(NamedTuple):
    """The parts of the name of a forward result: ``<scope>/<op_type>:<output>/<number>``."""

    scope: str
    op_type: str
    output: int
    number: int


def result(scope: str, op_type: str, output: int) -> str:
    """Return the name of a result of forward: ``<scope>/<OpType>:<output>``."""
    name = f"{op_type}:{output}"
    return f"{scope}/{name}" if scope else name


def is_result(name: str) -> bool:
    """Return whether a name is that of a forward result; copies that autograd keeps are not."""
    op_type = name.rpartition("/")[2] if not _numbered(name) else name.split("/")[-2]
    return ":" in op_type and _SEPARATOR not in name and not op_type.startswith("Detach:")


def result_parts(name: str) -> ResultParts | None:
    """Return the parts of the name of a forward result; None for any other name."""
    found = _RESULT.fullmatch(name)
    if found is None or _SEPARATOR in name or found[2] == "Detach":
        return None
    return ResultParts(found[1] or "", found[2], int(found[3]), int(found[4] or 0))


def module_output(path: str, call: int, output: int) -> str:
    """Return the name of an output of a module, where PyTorch runs the model.

    Args:
        path: The name of the module in ``named_modules()``; empty for the whole model.
        call: The number of the call of the module in this micro-batch, from 0.
        output: The index among the tensors that the call returns.
    """
    name = path or _WHOLE_MODEL
    return numbered(f"{name}[{output}]" if output else name, call)


def is_gradient(name: str) -> bool:
    """Return whether a name is that of the gradient of a tensor."""
    return name.startswith((_GRADIENT, "FinalReducedGradient"))


def kind_of(name: str) -> tuple[str, str]:
    """Return the kind of a tensor that is computed only if it is asked for, and its phase."""
    if name.startswith(_GRADIENT):
        return "gradient", "backward"
    if is_gradient(name):
        return "gradient", "update"
    if name.startswith(f"Stashed{_SEPARATOR}"):
        return "stashed", "forward"
    if name.startswith(f"Restored{_SEPARATOR}"):
        return "stashed", "backward"
    if is_result(name):
        return "activation", "forward"
    if any(f"{_SEPARATOR}{of}{_SEPARATOR}" in name for of in ("specific", "default")):
        return "hyper-parameter", "update"
    return "update", "update"


def scope_of(name: str) -> str:
    """Return the path of the modules that a tensor belongs to, ``layer1/0``; may be empty.

    A parameter belongs to its module, and so do its gradient, its state and its updated value.
    """
    tensor = name.rpartition(_SEPARATOR)[2]
    if ":" in tensor:
        return tensor.rpartition(":")[0].rpartition("/")[0]
    return tensor.rpartition(".")[0].replace(".", "/")


def _numbered(name: str) -> bool:
    """Return whether a name ends with a number that ``numbered`` adds."""
    return name.rpartition("/")[2].isdigit()


def numbered(name: str, number: int) -> str:
    """Return the name of another tensor with the name ``name``: with ``/1``, ``/2``, ... added."""
    return name if number == 0 else f"{name}/{number}"


def inputs(count: int) -> list[str]:
    """Return the names of a model's inputs, in flattened order: input, input/1, ..."""
    return [numbered(_INPUT, i) for i in range(count)]


def is_input(name: str) -> bool:
    """Return whether ``inputs`` made a name."""
    return re.fullmatch(rf"{_INPUT}(?:/[0-9]+)?", name) is not None


def gradient(name: str) -> str:
    """Return the name of the gradient of the tensor ``name``."""
    return f"{_GRADIENT}{name}"


def gradient_key(parameter: str) -> str:
    """Return the key of a parameter's gradient in a queue."""
    return f"{parameter}{_GRADIENT_KEY}"


def updated(name: str) -> str:
    """Return the name of a weight or state after its update."""
    return f"UpdatedVar{_SEPARATOR}{name}"


def updated_parameter(name: str) -> str:
    """Return the name of the weight of which ``updated`` made a name."""
    return name.partition(_SEPARATOR)[2]


def state(kind: str, parameter: str) -> str:
    """Return the name of an optimizer's state for a parameter, for example ``Accl1``."""
    return f"{kind}{_SEPARATOR}{parameter}"


def velocity_before_update(parameter: str) -> str:
    """Return the name of a combined velocity after a micro-batch's accumulation."""
    return f"AcclIntoReduce{_SEPARATOR}{parameter}"


def velocity_into_update(parameter: str) -> str:
    """Return the name of a combined velocity before the update, with all gradients."""
    return f"AcclIntoUpdate{_SEPARATOR}{parameter}"


def velocity_after_update(parameter: str) -> str:
    """Return the name of a combined velocity after the update."""
    return f"AcclOutOfAcclUpdate{_SEPARATOR}{parameter}"


def final_reduced_gradient(parameter: str) -> str:
    """Return the name of a gradient after accumulation, the input of plain SGD."""
    return f"FinalReducedGradient{_SEPARATOR}{parameter}"


def reduced_gradient(parameter: str) -> str:
    """Return the name of a gradient after accumulation, added up over all replicas."""
    return f"{parameter}_reducedGrad"


def nesterov_gradient(parameter: str) -> str:
    """Return the name of the step of Nesterov momentum, before the learning rate."""
    return f"{parameter}_nesterovGrad"


def unscaled_gradient(parameter: str) -> str:
    """Return the name of the averaged gradient without loss scale, in Nesterov momentum."""
    return f"{parameter}_sgdInverseLossScale"


def update_term(kind: str, parameter: str) -> str:
    """Return the name of a part of an update, for example ``AdamUpdater`` or ``LambR1Sq``."""
    return f"{kind}{_SEPARATOR}{parameter}"


def partial_gradient(operation: int, operand: int) -> str:
    """Return the name of the gradient that one use of a tensor contributes.

    Args:
        operation: Index of the differentiable operation of the model that uses it, counted from 0
            in the order of the calls.
        operand: Index of the operand of that operation.
    """
    return gradient(f"{operation}_{operand}")


def counter(ipu: int, stage: int | None) -> str:
    """Return the name of the counter of micro-batches in the running means of an IPU.

    Args:
        ipu: The IPU.
        stage: The pipeline stage; None without a pipeline.
    """
    name = f"{_COUNTER}VGraph{ipu}"
    return name if stage is None else f"{name}_PStage{stage}"


def stashed(name: str) -> str:
    """Return the name of a tensor that forward stores for the backward pass of a pipeline."""
    return f"Stashed{_SEPARATOR}{name}"


def restored(name: str) -> str:
    """Return the name of a stored tensor that the backward pass of a pipeline reads."""
    return f"Restored{_SEPARATOR}{name}"


def copied_to(name: str, ipu: int) -> str:
    """Return the name of the copy of a tensor that another IPU reads."""
    return f"{name}_c{ipu}"


def loss_scale(dtype: str) -> str:
    """Return the name of the loss scale of a model whose loss has a dtype."""
    return "lossScaling_FLOAT16" if dtype == "float16" else LOSS_SCALE


def hyper_parameter_kind(name: str) -> str:
    """Return the kind of a hyper-parameter's tensor, for example ``scaledLearningRate0``."""
    return name.partition(_SEPARATOR)[0]


def specific_hyper_parameter(kind: str, parameter: str) -> str:
    """Return the name of a hyper-parameter's value for one parameter."""
    return f"{kind}{_SEPARATOR}specific{_SEPARATOR}{parameter}"


def default_hyper_parameter(kind: str, dtype: str) -> str:
    """Return the name of a hyper-parameter's value for the parameters outside of all groups.

    Args:
        kind: The kind, for example ``scaledLearningRate0``.
        dtype: The dtype, for example ``float16``.
    """
    return f"{kind}{_SEPARATOR}default{_SEPARATOR}{dtype.upper().replace('FLOAT32', 'FLOAT')}"


def rebuilt(name: str) -> str:
    """Return the name of a forward tensor that the backward pass recomputes."""
    return f"{name}{_REBUILT}"


def is_rebuilt(name: str) -> bool:
    """Return whether ``rebuilt`` made a name."""
    return name.endswith(_REBUILT)


def print_title(title: str, name: str, *, is_gradient: bool) -> str:
    """Return the heading of a print: the user's title, or the name of the printed tensor."""
    if title:
        return f"{title}_gradient" if is_gradient else title
    return gradient(name) if is_gradient else name


def spellings(name: str) -> tuple[str, ...]:
    """Return the names to search for ``name``: older releases added ``model.``.

    ``Gradient___model.fc1.weight`` also means ``Gradient___fc1.weight`` and the other way round.
    The same holds for ``fc1.weight_grad``, its key in a queue. The given name comes first. Results
    of layers have the prefix ``model/`` if ``fit`` calls the model. The own module of a model may
    be called ``model``, too: the prefix is removed first, and then added.
    """
    lead, outer, tensor = _outer_parts(name)
    inner = tensor.removeprefix(outer)
    others = (outer + tensor,) if inner == tensor else (inner, outer + tensor)
    found = (name, *(lead + other for other in others))
    if lead or not name.endswith(_GRADIENT_KEY):
        return found
    return (*found, *spellings(gradient(name.removesuffix(_GRADIENT_KEY))))


def inside(name: str) -> str:
    """Return a name without the prefix of a module ``model`` around the user's model."""
    lead, outer, tensor = _outer_parts(name)
    return lead + tensor.removeprefix(outer)


def _outer_parts(name: str) -> tuple[str, str, str]:
    """Return what a name begins with, such as ``Gradient___``; the prefix; and the tensor."""
    lead, tensor = lead_and_tensor(name)
    return lead, _OUTER_SCOPE if ":" in tensor else _OLD_PREFIX, tensor


def lead_and_tensor(name: str) -> tuple[str, str]:
    """Return what says how a tensor is derived, such as ``Gradient___``, and the tensor's name."""
    prefix, separator, tensor = name.rpartition(_SEPARATOR)
    return prefix + separator, tensor


def inside_module(name: str, path: str) -> str | None:
    """Return the name that a tensor has if a module is the whole model.

    Args:
        name: The name of a tensor in the program or training loop of a larger model.
        path: The path of the module in it, ``encoder.0``; empty for the larger model itself.

    Returns:
        The name without the path; None if the tensor does not belong to the module.
    """
    if not path:
        return name
    lead, tensor = lead_and_tensor(name)
    separator = "/" if ":" in tensor else "."
    scope = path.replace(".", separator)
    if tensor.startswith(scope + separator):
        return lead + tensor.removeprefix(scope + separator)
    rest = tensor.removeprefix(scope)
    is_output = rest != tensor and _OUTPUT_NUMBERS.fullmatch(rest)
    return f"{lead}{_WHOLE_MODEL}{rest}" if is_output else None


def is_partial_gradient(name: str) -> bool:
    """Return whether ``partial_gradient`` made a name."""
    return _PARTIAL_GRADIENT.fullmatch(name) is not None


_RESERVED = (
    *(_GRADIENT, "UpdatedVar", "Accum", "Accl", "Step", "FinalReducedGradient", "GlobalNorm"),
    *("AdamUpdater", "AdaptiveUpdater", "LambR1Sq", "LambR2Sq", "Counter", "Stashed", "Restored"),
    *("anchorSum", "anchorFinal", "RemoteArg", "randomSeed"),
)


def is_reserved(name: str) -> bool:
    """Return whether a parameter's name could be confused with a tensor of the training graph."""
    prefix, separator, _ = name.partition(_SEPARATOR)
    return bool(separator) and f"{prefix}{separator}".startswith(_RESERVED)


_MISSING = {
    _GRADIENT: "A gradient exists only for tensors that need one and that the loss depends on.",
    _COUNTER: "Counters exist only with the mean reduction strategy Running.",
    "Accum___": "Accumulators exist only with gradient accumulation; combined SGD has none.",
    "AcclInto": "These exist for combined SGD with momentum only.",
    "AcclOutOf": "These exist for combined SGD with momentum only.",
    "AdaptiveUpdater": "These exist for RMSprop only.",
    "AdamUpdater": "These exist for Adam, AdamW and LAMB only.",
    "FinalReducedGradient": "These exist for plain SGD with gradient accumulation only.",
    "GlobalNorm": "It exists with max_grad_norm only.",
    "LambR": "These exist for LAMB only.",
    "Restored": "These exist for tensors that a stage of a training pipeline keeps for backward.",
    "Stashed": "These exist for tensors that a stage of a training pipeline keeps for backward.",
}


def why_missing(name: str) -> str:
    """Return a sentence, after a space, that says when such a tensor exists; may be empty."""
    for prefix, reason in _MISSING.items():
        if name.startswith(prefix):
            return f" {reason}"
    if is_rebuilt(name):
        return " A copy exists only for tensors that the backward pass recomputes."
    return ""
