"""All spellings of tensor names: nobody else forms or parses one.

Names are an interface, since programs anchor tensors by them. What a tensor *is* says its
``Tensor.role``; its name is for people.
"""

from __future__ import annotations

LOSS_SCALE = "lossScaling_FLOAT"
"""The seed of the backward pass of a float32 loss."""
LOSS_SCALE_FACTOR = "lossScaleUpdateFactor"
"""What the device multiplies the loss scale by, where it adapts that by itself."""
FINAL_LOSS_SCALE = "finalLossScale"
"""Loss scale times that factor: the seed of the backward pass then."""
GLOBAL_NORM = "GlobalNorm___0"
"""Norm of all gradients together, where they are clipped by it."""

_SEPARATOR = "___"
_GRADIENT = f"Gradient{_SEPARATOR}"
_REBUILT = "__re"
_COUNTER = f"Counter{_SEPARATOR}_"
_OLD_PREFIX = "model."
_OUTER_SCOPE = "model/"
_GRADIENT_KEY = "_grad"


def result(scope: str, op_type: str, output: int) -> str:
    """Return the name of a result of forward: ``<scope>/<OpType>:<output>``."""
    name = f"{op_type}:{output}"
    return f"{scope}/{name}" if scope else name


def is_result(name: str) -> bool:
    """Whether a name is that of a result of forward; a copy that autograd keeps is none."""
    op_type = name.rpartition("/")[2] if not _numbered(name) else name.split("/")[-2]
    return ":" in op_type and _SEPARATOR not in name and not op_type.startswith("Detach:")


def is_gradient(name: str) -> bool:
    """Whether a name is that of the gradient of a tensor."""
    return name.startswith((_GRADIENT, "FinalReducedGradient"))


def scope_of(name: str) -> str:
    """Return the path of the modules, ``layer1/0``, that a tensor belongs to; may be empty.

    A parameter belongs to its module, and so do its gradient, its state and its updated value.
    """
    tensor = name.rpartition(_SEPARATOR)[2]
    if ":" in tensor:
        return tensor.rpartition(":")[0].rpartition("/")[0]
    return tensor.rpartition(".")[0].replace(".", "/")


def _numbered(name: str) -> bool:
    """Whether a name ends with the number that ``numbered`` adds."""
    return name.rpartition("/")[2].isdigit()


def numbered(name: str, number: int) -> str:
    """Return the name of the next tensor that would be called ``name``: with ``/1``, ``/2``, ..."""
    return name if number == 0 else f"{name}/{number}"


def inputs(count: int) -> list[str]:
    """Return the names of a model's inputs, in flattened order: input, input/1, ..."""
    return [numbered("input", i) for i in range(count)]


def gradient(name: str) -> str:
    """Return the name of the gradient of the tensor ``name``."""
    return f"{_GRADIENT}{name}"


def gradient_key(parameter: str) -> str:
    """Return what the gradient of a parameter is called in a queue."""
    return f"{parameter}{_GRADIENT_KEY}"


def updated(name: str) -> str:
    """Return the name of a weight or state as its update left it."""
    return f"UpdatedVar{_SEPARATOR}{name}"


def state(kind: str, parameter: str) -> str:
    """Return the name of an optimizer's state, ``Accl1`` or the like, of a parameter."""
    return f"{kind}{_SEPARATOR}{parameter}"


def velocity_before_update(parameter: str) -> str:
    """Return the name of a combined velocity after a micro-batch's accumulation."""
    return f"AcclIntoReduce{_SEPARATOR}{parameter}"


def velocity_into_update(parameter: str) -> str:
    """Return the name of a combined velocity as the update takes it, all gradients in it."""
    return f"AcclIntoUpdate{_SEPARATOR}{parameter}"


def velocity_after_update(parameter: str) -> str:
    """Return the name of a combined velocity after the update."""
    return f"AcclOutOfAcclUpdate{_SEPARATOR}{parameter}"


def final_reduced_gradient(parameter: str) -> str:
    """Return the name of a gradient after accumulation, as plain SGD takes it."""
    return f"FinalReducedGradient{_SEPARATOR}{parameter}"


def nesterov_gradient(parameter: str) -> str:
    """Return the name of the step of Nesterov momentum, before the learning rate."""
    return f"{parameter}_nesterovGrad"


def unscaled_gradient(parameter: str) -> str:
    """Return the name of the true gradient in Nesterov momentum: without loss scale, averaged."""
    return f"{parameter}_sgdInverseLossScale"


def update_term(kind: str, parameter: str) -> str:
    """Return the name of a part of an update: ``AdamUpdater``, ``LambR1Sq`` or the like."""
    return f"{kind}{_SEPARATOR}{parameter}"


def partial_gradient(operation: int, operand: int) -> str:
    """Return the name of what one use of a tensor adds to its gradient.

    Args:
        operation: Which differentiable operation of the model uses it, counted from 0 in the
            order of their calls.
        operand: Which operand of that operation it is.
    """
    return gradient(f"{operation}_{operand}")


def counter(ipu: int, stage: int | None) -> str:
    """Return the name of the count of micro-batches in the running means of an IPU.

    Args:
        ipu: The IPU.
        stage: The pipeline stage, None where there is no pipeline.
    """
    name = f"{_COUNTER}VGraph{ipu}"
    return name if stage is None else f"{name}_PStage{stage}"


def stashed(name: str) -> str:
    """Return the name of a tensor as it is put aside for the backward pass of a pipeline."""
    return f"Stashed{_SEPARATOR}{name}"


def restored(name: str) -> str:
    """Return the name of a tensor as the backward pass of a pipeline gets it back."""
    return f"Restored{_SEPARATOR}{name}"


def copied_to(name: str, ipu: int) -> str:
    """Return the name of the copy of a tensor that another IPU reads."""
    return f"{name}_c{ipu}"


def loss_scale(dtype: str) -> str:
    """Return the name of the loss scale of a model whose loss has an element type."""
    return "lossScaling_FLOAT16" if dtype == "float16" else LOSS_SCALE


def hyper_parameter_kind(name: str) -> str:
    """Return what a hyper-parameter's tensor holds, ``scaledLearningRate0`` or the like."""
    return name.partition(_SEPARATOR)[0]


def specific_hyper_parameter(kind: str, parameter: str) -> str:
    """Return the name of a hyper-parameter's value for one parameter."""
    return f"{kind}{_SEPARATOR}specific{_SEPARATOR}{parameter}"


def default_hyper_parameter(kind: str, dtype: str) -> str:
    """Return the name of a hyper-parameter's value for the parameters outside of all groups.

    Args:
        kind: Such as ``scaledLearningRate0``.
        dtype: Element type, such as ``float16``.
    """
    return f"{kind}{_SEPARATOR}default{_SEPARATOR}{dtype.upper().replace('FLOAT32', 'FLOAT')}"


def rebuilt(name: str) -> str:
    """Return the name of a forward tensor as the backward pass computes it once more."""
    return f"{name}{_REBUILT}"


def print_title(title: str, name: str, *, is_gradient: bool) -> str:
    """Return what a print is headed with: the user's title, or the name of what is printed."""
    if title:
        return f"{title}_gradient" if is_gradient else title
    return gradient(name) if is_gradient else name


def spellings(name: str) -> tuple[str, ...]:
    """Return the names to look for where ``name`` is asked for: older releases added ``model.``.

    ``Gradient___model.fc1.weight`` stands for ``Gradient___fc1.weight`` and the other way round,
    and so does ``fc1.weight_grad``, its key in a queue; the name as given comes first. What layers
    compute has ``model/`` in front where ``fit`` calls the model.
    """
    prefix, separator, tensor = name.rpartition(_SEPARATOR)
    outer = _OUTER_SCOPE if ":" in tensor else _OLD_PREFIX
    other = tensor.removeprefix(outer) if tensor.startswith(outer) else outer + tensor
    found = (name, f"{prefix}{separator}{other}")
    if separator or not name.endswith(_GRADIENT_KEY):
        return found
    return (*found, *spellings(gradient(name.removesuffix(_GRADIENT_KEY))))


_RESERVED = (
    *(_GRADIENT, "UpdatedVar", "Accum", "Accl", "Step", "FinalReducedGradient", "GlobalNorm"),
    *("AdamUpdater", "AdaptiveUpdater", "LambR1Sq", "LambR2Sq", "Counter", "Stashed", "Restored"),
    *("anchorSum", "anchorFinal", "RemoteArg", "randomSeed"),
)


def is_reserved(name: str) -> bool:
    """Whether a parameter of this name could be taken for a tensor of the training graph."""
    prefix, separator, _ = name.partition(_SEPARATOR)
    return bool(separator) and f"{prefix}{separator}".startswith(_RESERVED)


_MISSING = {
    _GRADIENT: "A gradient exists only of what the loss depends on and what needs one.",
    _COUNTER: "Counters exist with the mean reduction strategy Running only.",
    "Accum___": "Accumulators exist with gradient accumulation only, combined SGD has none.",
    "AcclInto": "These exist for combined SGD with momentum only.",
    "AcclOutOf": "These exist for combined SGD with momentum only.",
    "AdaptiveUpdater": "These exist for RMSprop only.",
    "AdamUpdater": "These exist for Adam, AdamW and LAMB only.",
    "FinalReducedGradient": "These exist for plain SGD with gradient accumulation only.",
    "GlobalNorm": "It exists with max_grad_norm only.",
    "LambR": "These exist for LAMB only.",
    "Restored": "These exist for what a stage of a training pipeline keeps for its backward pass.",
    "Stashed": "These exist for what a stage of a training pipeline keeps for its backward pass.",
}


def why_missing(name: str) -> str:
    """Return when a tensor of such a name exists, a sentence with a space in front, or nothing."""
    for prefix, reason in _MISSING.items():
        if name.startswith(prefix):
            return f" {reason}"
    if name.endswith(_REBUILT):
        return " A copy exists only of what recomputation rebuilds in the backward pass."
    return ""
