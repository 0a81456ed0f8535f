"""What the options say about numbers: rounding, checks, and data made on the device."""

from __future__ import annotations

from dataclasses import dataclass

from popsim_torch.options import Options


@dataclass(frozen=True)
class Numerics:
    """The settings of the back end that concern numbers, off where nobody has set them.

    Attributes:
        floating_point_checks: A run ends at the first op whose arithmetic fails.
        stochastic_rounding: float16 results are rounded at random.
    """

    floating_point_checks: bool
    stochastic_rounding: bool

    @classmethod
    def of(cls, options: Options) -> Numerics:
        """Read the settings.

        Args:
            options: What a model is wrapped with.
        """
        settings = options._Popart.options
        return cls(
            floating_point_checks=bool(settings.get("enableFloatingPointChecks", False)),
            stochastic_rounding=bool(settings.get("enableStochasticRounding", False)),
        )
