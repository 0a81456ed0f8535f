"""The groups ``Training``, ``Precision`` and ``Jit`` of ``Options``.

Package private.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch

from popsim_torch.dtypes import held_dtype
from popsim_torch.enums import HalfFloatCastingBehavior, MeanReductionStrategy, ReductionType
from popsim_torch.errors import UsageTypeError, UsageValueError
from popsim_torch.options.base import (
    FreezableOptions,
    OptionsGroup,
    Setting,
    require_bool,
    require_enum,
)
from popsim_torch.options.popart import _PopartOptions

if TYPE_CHECKING:
    from typing_extensions import Self

AccumulationDType: TypeAlias = torch.dtype | Callable[[torch.nn.Parameter], torch.dtype]
"""The dtype of gradient accumulators, or a function that returns it for a parameter."""

_logger = logging.getLogger("poptorch::python")


def check_accumulation_dtype(where: str, dtype: object) -> torch.dtype:
    """Return a dtype if gradients can be accumulated in it, or raise an error."""
    if dtype is torch.float32 or dtype is torch.float16:
        return dtype
    raise UsageTypeError(
        f"{where}: gradients are accumulated in torch.float32 or torch.float16, got {dtype!r}."
    )


def own_dtype(parameter: torch.nn.Parameter) -> torch.dtype:
    """Return the dtype of a parameter on the device, for optimizers that use this dtype."""
    return held_dtype(parameter.dtype)


class _GroupWithBackEnd(OptionsGroup):
    """A group whose setters store some settings in ``_Popart``, for the back end.

    Args:
        back_end: The ``_Popart`` group of the same options.
    """

    _back_end: _PopartOptions

    def __init__(self, back_end: _PopartOptions) -> None:
        super().__init__()
        self.__dict__["_back_end"] = back_end

    def _parts(self) -> dict[str, FreezableOptions]:
        # The back end's settings are a group of the options, not of this group.
        return {}

    def _set_back_end(self, key: str, value: object) -> Self:
        self.checkIsFrozen()
        self._back_end.set(key, value)
        return self


class _TrainingOptions(_GroupWithBackEnd):
    """``Options.Training``: how gradients are combined for a weight update.

    For inference all values must be the defaults.
    """

    _path = "Options.Training"

    gradient_accumulation = Setting(1, setter="gradientAccumulation")
    gradient_accumulation_dtype = Setting[object](
        None, kind=object, setter="gradientAccumulationDtype", is_key=False
    )
    accumulation_and_replication_reduction_type = Setting(
        ReductionType.Mean,
        enum=ReductionType,
        setter="accumulationAndReplicationReductionType",
    )
    meanAccumulationAndReplicationReductionStrategy = Setting(
        MeanReductionStrategy.Post,
        enum=MeanReductionStrategy,
        setter="setMeanAccumulationAndReplicationReductionStrategy",
    )

    def gradientAccumulation(self, gradient_accumulation: int) -> Self:
        """Set the number of micro-batches that are accumulated for one weight update.

        The input needs that many times more data. The range is checked when the model is compiled.

        Args:
            gradient_accumulation: The number of micro-batches per weight update; 1 by default.

        Returns:
            The group itself.

        Raises:
            UsageAssertionError: The argument is not an int.
        """
        return self.set(gradient_accumulation=gradient_accumulation)

    def gradientAccumulationDtype(self, dtype: AccumulationDType | None) -> Self:
        """Choose the dtype in which the gradients of micro-batches are accumulated.

        The weight update reads gradients of that dtype. It replaces the ``accum_type`` of
        optimizers of ``poptorch.optim``. Sums in float16 overflow sooner; the mean reduction
        strategy ``Running`` avoids this, because it keeps means instead.

        Args:
            dtype: ``torch.float32`` or ``torch.float16``; a function that returns one of them for a
                parameter; None (the default) for the dtype of the optimizer, which is float32 for
                optimizers of ``torch.optim``.

        Returns:
            The group itself.

        Raises:
            UsageTypeError: The argument is something else.
        """
        where = "Options.Training.gradientAccumulationDtype"
        if dtype is not None and not callable(dtype):
            check_accumulation_dtype(where, dtype)
        return self.set(gradient_accumulation_dtype=dtype)

    def accumulationAndReplicationReductionType(self, reduction_type: ReductionType) -> Self:
        """Choose whether the gradients of micro-batches are averaged or added up.

        The reduction inside the loss does not change.

        Args:
            reduction_type: ``ReductionType.Mean`` (the default) or ``ReductionType.Sum``.

        Returns:
            The group itself.

        Raises:
            UsageValueError: The argument is something else.
        """
        if reduction_type not in (ReductionType.Mean, ReductionType.Sum) or not isinstance(
            reduction_type, ReductionType
        ):
            raise UsageValueError(
                "Options.Training.accumulationAndReplicationReductionType"
                f"({reduction_type!r}): use ReductionType.Mean or ReductionType.Sum."
            )
        return self.set(accumulation_and_replication_reduction_type=reduction_type)

    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_reduction_strategy: MeanReductionStrategy
    ) -> Self:
        """Choose when a mean over micro-batches is divided by their number.

        This changes only rounding and overflow.

        Args:
            mean_reduction_strategy: ``MeanReductionStrategy.Post`` (the default), ``Running``, or
                the deprecated ``PostAndLoss``, which is the same as ``Post`` on one replica.

        Returns:
            The group itself.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: The argument is not a ``MeanReductionStrategy``.
        """
        require_enum(
            "Options.Training.setMeanAccumulationAndReplicationReductionStrategy",
            mean_reduction_strategy,
            MeanReductionStrategy,
        )
        return self.set(meanAccumulationAndReplicationReductionStrategy=mean_reduction_strategy)

    def setAutomaticLossScaling(self, enabled: bool) -> Self:
        """Adjust the loss scale automatically to the size of the gradients.

        The scale of the backward pass is the optimizer's ``loss_scaling`` times a factor, which the
        device keeps. The product is the tensor ``finalLossScale``, which can be anchored. The
        factor begins at 1. After every weight update it is halved if more than one in ten million
        values in the parameters' gradients were close to overflow (an eighth of 65504, the largest
        number of float16, or more, or NaN), and doubled otherwise. It is not doubled if
        ``finalLossScale`` would then be more than 32768, and not halved below 2^-24. All
        micro-batches of an update have the same scale.

        Updates divide the gradients by the scale, and returned losses are not scaled. So weights
        and losses are the same as without scaling, except for rounding, overflow and underflow.
        ``Gradient___`` tensors show the scaled gradients. An update whose gradients overflow is
        applied all the same.

        ``state_dict()`` of an optimizer of ``poptorch.optim`` has the factor of the next run as
        ``ipu_state["lossScaleUpdateFactor"]``; loading the dict restores the factor. The
        optimizer's ``loss_scaling`` becomes a variable: ``setOptimizer`` can change it.

        ``Options._Popart.set`` changes the constants, by the names
        ``automaticLossScalingSettings.`` with ``binEdgeLocation`` (0.125, of 65504),
        ``thresholdUpperCountProportion`` (1e-7) and ``updatePeriod`` (1, in weight updates).

        Args:
            enabled: Whether to do so; False by default.

        Returns:
            The group itself.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: The argument is not a bool.
        """
        require_bool("Options.Training.setAutomaticLossScaling", enabled)
        return self._set_back_end("automaticLossScalingSettings.enabled", enabled)

    def setConvolutionDithering(self, enabled: bool) -> Self:
        """Give a hint to spread convolutions over the tiles at random offsets.

        It has no effect on values, and no effect yet on the model of time and memory.

        Args:
            enabled: Whether to do so.

        Returns:
            The group itself.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: The argument is not a bool.
        """
        require_bool("Options.Training.setConvolutionDithering", enabled)
        dithering = {"enableConvDithering": str(enabled).lower()}
        return self._set_back_end("convolutionOptions", dithering)


class _PrecisionOptions(_GroupWithBackEnd):
    """``Options.Precision``: number formats and rounding. All are settings of the back end."""

    _path = "Options.Precision"

    def enableFloatingPointExceptions(self, enabled: bool) -> Self:
        """Raise an error at the first op of a run whose arithmetic fails.

        Running the model then raises ``Error``, which names the op, its result, the line of the
        model and one of these:

        * invalid operation: a result is NaN although no operand is, for example of ``inf - inf``,
          ``0 / 0``, ``inf / inf``, ``0 * inf`` or the square root of a negative number; or an
          operand of ``<``, ``<=``, ``>``, ``>=``, ``==`` or ``!=`` is NaN (except in ``x != x``,
          which tests for NaN).
        * division by zero: a value is infinite because a finite one was divided by zero, or as the
          result of ``log(0)``, ``rsqrt(0)`` or ``0 ** -1``.
        * overflow: a result is infinite although no operand is, for any other reason. A float16
          result overflows above 65504.

        Element-wise ops are checked value by value. Other ops (products, sums, norms) fail if any
        value of the result is NaN or infinite and none of the operands is. Only results are
        checked, not the intermediate values of an op. Infinities and NaN that the model gets are
        not failures: inputs, weights, constants such as a mask of ``-inf``, ``masked_fill(mask,
        -inf)``. Well-defined results of infinities are not failures either: ``exp(-inf)`` is 0.

        Values that depend only on constants are computed, and checked, when the model is compiled.
        After a failure the executor can be called again, as after any other error of a run; an
        update that fails has already changed its weight. The checks change no values. With the
        checks ops are not joined, and runs take several times as long; without them there is no
        cost.

        Args:
            enabled: Whether to do so; False by default.

        Returns:
            The group itself.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: The argument is not a bool.
        """
        require_bool("Options.Precision.enableFloatingPointExceptions", enabled)
        return self._set_back_end("enableFloatingPointChecks", enabled)

    def enableStochasticRounding(self, enabled: bool) -> Self:
        """Round float16 results up or down at random.

        A result between two float16 numbers becomes the one above or the one below, with
        probabilities that keep the average equal to the result. So a sum of many terms takes even
        terms into account that are too small to change a float16 number: half weights train with
        small learning rates. Exact float16 numbers, NaN and infinities do not change; numbers
        beyond 65504 are rounded to nearest.

        This applies to each float16 result of an op of forward, backward and update, including
        weights, accumulators and optimizer state, and to no other dtype. Values that depend only on
        constants, and random numbers, are rounded to nearest. An op computes in float32 internally,
        so ``setPartialsType(torch.half)`` has no effect together with this option.

        The rounding depends on ``randomSeed``, the position in the model and the micro-batch, as
        other random numbers do: runs with the same seed have the same bits, on any number of
        threads, with any stages, anchors, prints and recomputation. Ops are joined less, so runs
        take longer.

        Args:
            enabled: Whether to do so; False by default.

        Returns:
            The group itself.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: The argument is not a bool.
        """
        require_bool("Options.Precision.enableStochasticRounding", enabled)
        return self._set_back_end("enableStochasticRounding", enabled)

    def setPartialsType(self, dtype: torch.dtype) -> Self:
        """Choose the dtype of partial sums in products of float16 operands.

        It applies to matrix products, convolutions and recurrent layers, forward and backward. With
        float32 operands partial sums are always float32. In half, up to 16 products at a time are
        summed in float32, and the running sum is rounded to float16 after each such pass: above
        65504 it becomes infinite. ``docs/half_partials.md`` says which products make a pass. If
        this call and ``_Popart`` settings choose the partials type, the last one takes effect; but
        the entry of ``matmulOptions`` overrides all others.

        Args:
            dtype: ``torch.float``, the default, or ``torch.half``.

        Returns:
            The group itself.

        Raises:
            UsageValueError: The argument is neither.
        """
        if dtype not in (torch.float, torch.half):
            raise UsageValueError(
                f"Options.Precision.setPartialsType({dtype!r}): use torch.float or torch.half."
            )
        partials = "half" if dtype == torch.half else "float"
        self._set_back_end("partialsTypeMatMuls", partials)
        return self._set_back_end("convolutionOptions", {"partialsType": partials})

    def halfFloatCasting(self, half_float_casting: HalfFloatCastingBehavior) -> Self:
        """Only log a warning; no effect: mixed operands follow PyTorch's promotion (deprecated).

        Args:
            half_float_casting: Ignored.

        Returns:
            The group itself.

        Raises:
            UsageAttributeError: The options are frozen.
        """
        self.checkIsFrozen()
        _logger.warning(
            "Options.Precision.halfFloatCasting is deprecated and has no effect: "
            "operations on float16 and float32 follow PyTorch's type promotion."
        )
        return self

    def runningStatisticsAlwaysFloat(self, enabled: bool) -> Self:
        """Only log a warning; no effect: running statistics keep their own dtype (deprecated).

        Args:
            enabled: Ignored.

        Returns:
            The group itself.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageValueError: ``enabled`` is not a bool.
        """
        self.checkIsFrozen()
        if not isinstance(enabled, bool):
            raise UsageValueError(
                f"Options.Precision.runningStatisticsAlwaysFloat({enabled!r}): pass a bool."
            )
        _logger.warning(
            "Options.Precision.runningStatisticsAlwaysFloat is deprecated and has no effect: "
            "running statistics keep the type of their buffers."
        )
        return self


class _JitOptions(OptionsGroup):
    """``Options.Jit``: kept for compatibility, without any choices."""

    _path = "Options.Jit"

    def traceModel(self, trace_model: bool) -> Self:
        """Only log a warning; no effect (deprecated).

        Args:
            trace_model: Must be False.

        Returns:
            The group itself.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageValueError: The argument is True: models are not traced with ``torch.jit``.
        """
        self.checkIsFrozen()
        _logger.warning("Options.Jit.traceModel is deprecated and has no effect.")
        if trace_model:
            raise UsageValueError(
                "Options.Jit.traceModel(True): tracing with torch.jit is not supported. Remove "
                "the call."
            )
        return self
