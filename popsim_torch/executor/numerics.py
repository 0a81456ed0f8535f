"""The options that concern numbers: rounding, checks, and data made on the device."""

from __future__ import annotations

from dataclasses import dataclass

from popsim_torch.errors import Error
from popsim_torch.optim.loss_scale import LossScaleRule
from popsim_torch.options import Options
from popsim_torch.options.limits import num_replicas
from popsim_torch.passes.synthetic_data import SyntheticData


@dataclass(frozen=True)
class Numerics:
    """The settings of the back end that concern numbers; all are off by default.

    Attributes:
        floating_point_checks: Whether a run ends at the first op whose arithmetic fails.
        stochastic_rounding: Whether float16 results are rounded at random.
        loss_scale_rule: How the device adapts the loss scale automatically; None if it does not.
        synthetic_data: The inputs that the device makes instead of reading them from the host.
    """

    floating_point_checks: bool
    stochastic_rounding: bool
    loss_scale_rule: LossScaleRule | None
    synthetic_data: SyntheticData

    @classmethod
    def of(cls, options: Options) -> Numerics:
        """Read the settings.

        Args:
            options: The options of a model; their values are already checked.

        Raises:
            Error: A setting of automatic loss scaling is out of range.
        """
        settings = options._Popart.options
        return cls(
            floating_point_checks=bool(settings.get("enableFloatingPointChecks", False)),
            stochastic_rounding=bool(settings.get("enableStochasticRounding", False)),
            loss_scale_rule=_loss_scale_rule(options),
            synthetic_data=SyntheticData(settings.get("syntheticDataMode", 0)),
        )


_SCALING = "automaticLossScalingSettings."


def scales_automatically(options: Options) -> bool:
    """Return whether the device adapts the loss scale automatically."""
    return bool(options._Popart.options.get(f"{_SCALING}enabled", False))


def _loss_scale_rule(options: Options) -> LossScaleRule | None:
    """Read the settings of automatic loss scaling.

    Raises:
        Error: A setting is out of range.
    """
    if not scales_automatically(options):
        return None
    settings, default = options._Popart.options, LossScaleRule()

    def number(name: str, initial: float, least: float, most: float) -> float:
        value: float = settings.get(_SCALING + name, initial)
        if least <= value <= most:
            return value
        raise Error(
            f"Options._Popart.set('{_SCALING}{name}', {value!r}): pass a number from {least} to "
            f"{most}, or leave it out for {initial}."
        )

    return LossScaleRule(
        edge=number("binEdgeLocation", default.edge, 0.0, 1.0),
        share=number("thresholdUpperCountProportion", default.share, 0.0, 1.0),
        period=int(number("updatePeriod", default.period, 1, 2**20)),
        micro_batches=options.Training.gradient_accumulation * num_replicas(options),
    )
