"""``set_pipelining_options`` and ``set_gradient_accumulation_options``.

TensorFlow programs for IPUs set these on a model. They become settings of ``Options``: those of a
model are added to the options with which it is wrapped.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from popsim_torch.enums import PipelineSchedule
from popsim_torch.errors import UsageTypeError, closest_names
from popsim_torch.options.groups import AccumulationDType
from popsim_torch.options.model_settings import set_on_model
from popsim_torch.options.options import Options
from popsim_torch.options.pipelining_checks import checked
from popsim_torch.options.pipelining_settings import (
    GradientAccumulationReductionMethod,
    PipeliningOptions,
    RecomputationMode,
)

__all__ = [
    "GradientAccumulationReductionMethod",
    "PipeliningOptions",
    "RecomputationMode",
    "pipeline_settings",
    "set_gradient_accumulation_options",
    "set_pipelining_options",
]

SUM = GradientAccumulationReductionMethod.SUM


def set_pipelining_options(
    target: nn.Module | Options,
    gradient_accumulation_steps_per_replica: int | None = None,
    device_mapping: Sequence[int] | None = None,
    accumulate_outfeed: bool | None = None,
    gradient_accumulation_reduction_method: GradientAccumulationReductionMethod = SUM,
    pipeline_schedule: PipelineSchedule | None = None,
    *,
    recomputation_mode: RecomputationMode | None = None,
    gradient_accumulation_dtype: AccumulationDType | None = None,
    accumulate_outfeed_dtype: torch.dtype | None = None,
    offload_weight_update_variables: bool | None = None,
    offload_activations: bool | None = None,
    offload_gradient_accumulation_buffers: bool | None = None,
    offload_weights: bool | None = None,
    replicated_optimizer_state_sharding: bool = False,
    replicated_weight_sharding: bool = False,
    forward_propagation_stages_poplar_options: Sequence[dict[str, str]] | None = None,
    backward_propagation_stages_poplar_options: Sequence[dict[str, str]] | None = None,
    weight_update_poplar_options: dict[str, str] | None = None,
    batch_serialization_iterations: int = 1,
    continuous_weight_updates: bool = False,
) -> PipeliningOptions:
    """Set how a pipeline runs, on a model or on the options for models.

    All arguments are checked at once, except where the check needs the model's stages.
    ``explain()`` of the result describes the effect of each option. On a model the options replace
    those of an earlier call of this function or of ``set_gradient_accumulation_options``.

    Args:
        target: ``Options``, or a model that ``trainingModel``, ``inferenceModel``, ``fit`` or a
            loop will use: the model itself, a copy, or a module that contains it. The settings of a
            model are added to the options; it is an error if the options, or another model of the
            same program, contradict them.
        gradient_accumulation_steps_per_replica: The number of micro-batches per weight update, a
            multiple of ``2 n`` (``Grouped``), ``n`` (``Interleaved``) or 1 for ``n`` stages. It is
            required, except for ``Sequential``, or if the options already have a count.
        device_mapping: The IPU of each stage; None puts stage ``i`` on IPU ``i``.
        accumulate_outfeed: Return one sum of each output instead of its values
            (``OutputMode.Sum``).
        gradient_accumulation_reduction_method: ``SUM`` (the default, even if the options have
            PopTorch's mean), ``MEAN`` or ``RUNNING_MEAN``.
        pipeline_schedule: A ``PipelineSchedule``; None for ``Grouped``.
        recomputation_mode: Which values the backward pass rebuilds; None for ``Auto``.
        gradient_accumulation_dtype: The dtype of accumulators, or a function that returns it for a
            parameter: ``torch.float32`` or ``torch.float16``; None for the choice of the optimizer.
        accumulate_outfeed_dtype: Must be None: outputs are added up in their own dtype.
        offload_weight_update_variables: A hint about memory, as ``Options.TensorLocations``.
        offload_activations: A hint about memory.
        offload_gradient_accumulation_buffers: A hint about memory.
        offload_weights: A hint about memory.
        replicated_optimizer_state_sharding: A hint about memory.
        replicated_weight_sharding: A hint about memory.
        forward_propagation_stages_poplar_options: Hints about compute, a dict for each stage.
        backward_propagation_stages_poplar_options: Hints about compute, a dict for each stage.
        weight_update_poplar_options: A hint about compute, a dict.
        batch_serialization_iterations: Must be 1.
        continuous_weight_updates: Must be False.

    Returns:
        The options that were set.

    Raises:
        UsageTypeError: An argument has a wrong type.
        UsageValueError: An argument is out of range, or two contradict each other.
        UsageAttributeError: The options are frozen.
        Error: An option is not supported by this version.
    """
    given: dict[str, Any] = dict(locals())
    del given["target"]
    settings = checked("set_pipelining_options", _known_count(target), given, pipelined=True)
    return _set("set_pipelining_options", target, settings)


def set_gradient_accumulation_options(
    target: nn.Module | Options,
    gradient_accumulation_steps_per_replica: int | None = None,
    gradient_accumulation_reduction_method: GradientAccumulationReductionMethod = SUM,
    *,
    gradient_accumulation_dtype: AccumulationDType | None = None,
    offload_weight_update_variables: bool | None = None,
    replicated_optimizer_state_sharding: bool = False,
) -> PipeliningOptions:
    """Set how a model that is not a pipeline accumulates gradients.

    Args:
        target: As for ``set_pipelining_options``.
        gradient_accumulation_steps_per_replica: The number of micro-batches per weight update, 1 or
            more; None for the count of the options, or else 1.
        gradient_accumulation_reduction_method: As for ``set_pipelining_options``.
        gradient_accumulation_dtype: As for ``set_pipelining_options``.
        offload_weight_update_variables: As for ``set_pipelining_options``.
        replicated_optimizer_state_sharding: As for ``set_pipelining_options``.

    Returns:
        What was set.

    Raises:
        UsageTypeError: An argument has a wrong type.
        UsageValueError: An argument is out of range.
        UsageAttributeError: The options are frozen.
        Error: An option is not supported by this version.
    """
    given: dict[str, Any] = dict(locals())
    del given["target"]
    function = "set_gradient_accumulation_options"
    return _set(function, target, checked(function, _known_count(target), given, pipelined=False))


def pipeline_settings(
    function: str, *, num_stages: int, positions: tuple[int, ...], training: bool, **given: Any
) -> PipeliningOptions:
    """Return the options of a pipeline whose stages are known.

    Args:
        function: The call, for messages.
        num_stages: The number of stages.
        positions: The position of each stage in the pipeline; empty if no stages are concurrent.
        training: Whether there are backward stages.
        **given: Arguments of ``set_pipelining_options``, without the target.

    Raises:
        UsageTypeError: An argument has a wrong type, or does not exist.
        UsageValueError: An argument is out of range, or two contradict each other.
        Error: An option is not supported by this version.
    """
    known = {
        name: parameter.default
        for name, parameter in inspect.signature(set_pipelining_options).parameters.items()
        if name != "target"
    }
    for name in given.keys() - known.keys():
        close = closest_names(name, known)
        hint = f" Closest name: '{close[0]}'." if close else ""
        raise UsageTypeError(f"{function}: there is no argument '{name}'.{hint}")
    return checked(
        function,
        None,
        known | given,
        pipelined=True,
        training=training,
        num_stages=num_stages,
        positions=positions,
    )


def _known_count(target: object) -> int | None:
    """Return the count of the options, or None if it is the default."""
    if not isinstance(target, Options):
        return None
    count: int = target.Training.gradient_accumulation
    return count if count > 1 else None


def _set(function: str, target: object, settings: PipeliningOptions) -> PipeliningOptions:
    if isinstance(target, Options):
        settings.apply(target)
        return settings
    model = target if isinstance(target, nn.Module) else getattr(target, "model", None)
    # A model that is being trained has a class of this package (``executor.host_weights``).
    is_wrapped = model is not target or hasattr(type(model), "_popsim_class")
    if isinstance(model, nn.Module) and is_wrapped:
        raise UsageTypeError(
            f"{function}: the model is wrapped already, and its options are frozen. Call this on "
            "the model before trainingModel or inferenceModel, or on their options."
        )
    if not isinstance(model, nn.Module):
        raise UsageTypeError(
            f"{function}: got a {type(target).__name__}. Pass a torch.nn.Module or a "
            "poptorch.Options."
        )
    set_on_model(model, settings)
    return settings
