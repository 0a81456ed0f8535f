"""The helpers for tests of update plans."""

from popsim_torch import optim
from popsim_torch.optim.planning import plan_updates

LOGGER = "poptorch::python"


def plan(optimizer, model, **options):
    parameters = dict(model.named_parameters())
    return plan_updates(optimizer, parameters, **options)


def scalars(made_plan, parameter="weight"):
    """Return prefix -> (value, constant) of one parameter's scalars."""
    (update,) = [u for u in made_plan.updates if u.parameter == parameter]
    return {s.name.split("___")[0]: (s.value, s.constant) for s in update.all_scalars}


def values(made_plan, parameter="weight"):
    return {prefix: value for prefix, (value, _) in scalars(made_plan, parameter).items()}


def combined_sgd(fc, **more):
    settings = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.2}
    settings |= {"loss_scaling": 8.0, "velocity_scaling": 2.0, "use_combined_accum": True}
    return optim.SGD(fc.parameters(), **(settings | more))
