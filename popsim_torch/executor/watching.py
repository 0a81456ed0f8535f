"""Where numbers can be watched."""

from __future__ import annotations

from popsim_torch import logs
from popsim_torch.optim.plan import OptimizerPlan
from popsim_torch.options import Options

__all__ = ["watches"]


def watches(options: Options, plan: OptimizerPlan | None, *, is_loop: bool) -> bool:
    """Return whether a program checks its numbers; warn if its options ask for it in vain.

    Args:
        options: The options of the program.
        plan: The optimizer's updates; None if nothing is trained.
        is_loop: Whether it is a loop of a function.
    """
    if options._watching is None:
        return False
    if is_loop and (plan is None or not plan.updates):
        logs.warn_once(
            "Options.watch has no effect in a loop that steps no optimizer, such as those of "
            "evaluate and predict. To watch the outputs of a model, call a "
            "poptorch.inferenceModel with these options."
        )
        return False
    return True
