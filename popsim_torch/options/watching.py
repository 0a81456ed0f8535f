"""``Options.watch``: what to do when a number becomes NaN or infinite. Package private."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from popsim_torch.errors import UsageTypeError, UsageValueError
from popsim_torch.options.base import OptionsGroup

if TYPE_CHECKING:
    from typing_extensions import Self

    from popsim_torch.verdict import Verdict

__all__ = ["NumberWatching", "WatchOptions"]


@dataclass(frozen=True)
class NumberWatching:
    """How bad numbers are watched for.

    Attributes:
        then: Called with the verdict; None to raise an error.
        capsule: The folder or file for capsules; None for none.
    """

    then: Callable[[Verdict], object] | None
    capsule: str | None

    def __deepcopy__(self, memo: dict[int, Any]) -> NumberWatching:
        # The callable stays the user's object.
        return self


class WatchOptions(OptionsGroup):
    """The setting that watches for bad numbers."""

    _watching: NumberWatching | None = None

    def _watch_nothing(self) -> None:
        """Remove the setting, for a program that only helps one that is watched."""
        self.__dict__["_watching"] = None

    def watch(
        self,
        at: Literal["updates"] = "updates",
        *,
        then: Literal["stop"] | Callable[[Verdict], object] = "stop",
        capsule: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Watch for the first number that is NaN or infinite, and say where it comes from.

        Training checks the loss (each output that is one number) and all that the weight update
        reads, before the update changes a weight; inference checks all floating-point outputs.
        These checks change no bit, and cost about one percent; more with ``use_combined_accum``
        and centered RMSprop, which copy state in each iteration. When a check fails, weights,
        optimizer state and buffers are put back to those before the device iteration. The iteration
        is then repeated op by op, on a second program that is compiled at that moment, to find the
        op that computed the first bad number.

        Loops of ``fit``, ``poptorch.function`` and ``pipeline`` that step an optimizer are watched
        in the same way. Their losses are the tensors of one number whose ``backward()`` the body
        calls; one that nothing else reads is not computed. Carried values are put back as well,
        and queues keep the elements of a device iteration until its update is over. Loops
        that step no optimizer, as in ``evaluate``, are not watched, with a warning; neither are the
        validation of ``fit`` and the condition of a ``while_loop``, without one.

        The repeated iteration puts nothing into queues and prints nothing. What the failed one has
        put into queues stays there, and does not come again if the iteration does. Functions of
        ``poptorch.CPU`` are called again. In inference, buffers that ``forward`` changes keep the
        values of the failed run. The setting is not a part of files.

        Args:
            at: Where to look: ``"updates"``, as described above.
            then: ``"stop"`` ends the call with ``BadNumberError``, whose ``verdict`` says what
                happened; the model can be called again. A function is called with the ``Verdict``
                instead, and training goes on: if it returns True, the device iteration is left out
                and weights keep their values; otherwise the update happens as it would have. The
                outputs of an iteration that is left out have no meaning. In a loop it still takes
                its elements from infeed queues, and its micro-batches give theirs to outfeed
                queues; elements that the update enqueues (gradients, sums over micro-batches) are
                missing.
            capsule: A folder, or a file whose name ends in ``.capsule``: all that repeats the
                iteration is written there, for ``popsim replay`` and ``poptorch.replay``. A program
                that calls ``poptorch.CPU`` or ``custom_op`` has no such file, since files have no
                code.

        Returns:
            The options.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageTypeError: ``then`` or ``capsule`` has another type.
            UsageValueError: ``at`` is another word.
        """
        self.checkIsFrozen()
        if at != "updates":
            raise UsageValueError(f"Options.watch(at={at!r}): the only place is 'updates'.")
        if then != "stop" and not callable(then):
            raise UsageTypeError(
                f"Options.watch(then={then!r}): pass 'stop', or a function that takes a Verdict."
            )
        if capsule is not None and not isinstance(capsule, (str, os.PathLike)):
            raise UsageTypeError(
                f"Options.watch(capsule={capsule!r}): pass the path of a folder or file."
            )
        self.__dict__["_watching"] = NumberWatching(
            None if isinstance(then, str) else then,
            None if capsule is None else os.fsdecode(capsule),
        )
        return self
