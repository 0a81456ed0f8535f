"""The evaluation that follows each epoch of a fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from popsim_torch.errors import UsageTypeError
from popsim_torch.options import Options
from popsim_torch.training.batches import Batches
from popsim_torch.training.execution import Execution
from popsim_torch.training.model_call import ModelCall, mode
from popsim_torch.training.steps import plan_steps

__all__ = ["VALIDATED", "Validation", "plan_validation"]

VALIDATED = "val_"
"""The prefix for names of values that are computed from the validation data."""

_STEPS = "validation_steps"


@dataclass
class Validation:
    """Evaluates a model any number of times, with one program.

    Attributes:
        call: Calls the model.
        execution: Runs the program; None if there is no data for validation.
        num_runs: The number of runs of the device in an evaluation.
    """

    call: ModelCall
    execution: Execution | None = None
    num_runs: int = 0

    def run(self) -> dict[str, float]:
        """Return the mean loss and metrics by name; an empty dict if there is no data."""
        if self.execution is None:
            return {}
        with mode(self.call.model, training=False):
            parts = [self.execution.run() for _ in range(self.num_runs)]
        return {
            VALIDATED + name: torch.cat([part[name] for part in parts]).double().mean().item()
            for name in parts[0]
        }

    def close(self) -> None:
        """End the program."""
        if self.execution is not None:
            self.execution.end()


def on_one_replica(options: Options) -> Options:
    """Return the options for an evaluation, which gives the same results on one replica."""
    return options.clone().inputReplicaGrouping(1).replicationFactor(1)


def plan_validation(
    call: ModelCall, data: Any, steps: int | None, epochs: int, options: Options
) -> Validation:
    """Return the object that evaluates a model after each epoch.

    Args:
        call: Calls the model.
        data: Batches; None for no evaluation.
        steps: The number of batches in an evaluation; None for one pass through the data.
        epochs: The number of evaluations.
        options: The options of the program that trains.

    Raises:
        UsageTypeError: The data has a wrong type, or there are steps but no data.
        UsageValueError: The counts contradict each other.
    """
    if data is None:
        if steps is not None:
            raise UsageTypeError(
                "fit: validation_steps is given without validation_data. Pass both, or neither."
            )
        return Validation(call)
    batches = Batches("fit", data, "validation_data")
    options = on_one_replica(options)
    options.anchored_tensors.clear()
    options._observations.clear()
    options._watch_nothing()
    counts = plan_steps(
        *("fit", batches.count, steps, None),
        epoch_name=_STEPS,
        data_name="validation_data",
    )
    total = epochs * counts.per_epoch
    batches.check_sizes(total)

    def body(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return call(args, kwargs)

    stream = batches.stream(total)
    execution = Execution(
        *("fit", body, stream, counts.per_execution, None, options), steps_name=_STEPS
    )
    return Validation(call, execution, counts.executions)
