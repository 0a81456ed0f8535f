"""Tells of weights that two programs train, each its own copy."""

from __future__ import annotations

from torch import nn

from popsim_torch import logs
from popsim_torch.executor.host_weights import is_trained

__all__ = ["warn_of_shared_weights"]

_MOST_NAMES = 5


def warn_of_shared_weights(model: nn.Module) -> None:
    """Warn of parameters that the program of another model trains already.

    Each program has its own copy of them on the device: what one trains, the other does not see.

    Args:
        model: A model that is about to be trained.
    """
    names = [name for name, tensor in model.named_parameters() if is_trained(tensor)]
    if not names:
        return
    more = f" and {len(names) - _MOST_NAMES} others" if len(names) > _MOST_NAMES else ""
    logs.python.warning(
        "trainingModel: another training model has these parameters too: %s%s. Each program trains "
        "its own copy on the device, where eager PyTorch has one. To go on with the weights of the "
        "other, call first.copyWeightsToHost() and second.copyWeightsToDevice() before a call of "
        "the second; or train both in one forward.",
        ", ".join(names[:_MOST_NAMES]),
        more,
    )
