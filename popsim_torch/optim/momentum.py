"""Momentum that is 0 for some steps."""

from __future__ import annotations

from popsim_torch.errors import Error
from popsim_torch.optim.settings import OptimizerSettings

__all__ = ["check_momentum"]


def check_momentum(old: OptimizerSettings, new: OptimizerSettings) -> None:
    """Refuse a momentum of PyTorch's optimizers that leaves 0: their buffers stay while it is 0.

    Args:
        old: The settings before.
        new: Those after, for the same update rule.

    Raises:
        Error: The momentum of a group has been 0, and is more now.
    """
    if old.rule.traced or old.trains_all or new.trains_all:
        return
    for index, (before, after) in enumerate(zip(old.groups, new.groups, strict=False)):
        pair = [group.values.get("momentum") for group in (before, after)]
        if pair[0] is None or pair[1] is None or pair[0].value or not pair[1].value:
            continue
        raise Error(
            f"The momentum of group {index} was 0, and is {pair[1].value} now. While it is 0, "
            "the device writes gradients to the momentum buffers, which eager PyTorch leaves as "
            "they are. Add a hook to the optimizer before the model is compiled, "
            "optimizer.register_step_post_hook(lambda *_: None): then the device does what the "
            "optimizer's own step does."
        )
