"""Conditions on records: ``when`` and ``then`` of ``Options.observe``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from popsim_torch import logs
from popsim_torch.errors import RecordError
from popsim_torch.observe.record import Record

__all__ = ["Condition", "Judge"]


@dataclass(frozen=True)
class Condition:
    """A condition on the records of some tensors.

    Attributes:
        names: The names of the tensors.
        when: Returns whether a record meets the condition.
        then: Called with such a record; None to end the run.
    """

    names: frozenset[str]
    when: Callable[[Record], object]
    then: Callable[[Record], object] | None


class Judge:
    """Looks for records that meet conditions; each condition ends a run once, the first one counts.

    Args:
        conditions: The conditions.
        ring: Ends the run with an exception.
        met: Conditions that were met before.

    Attributes:
        met: The conditions that were met, or have raised an exception.
    """

    def __init__(
        self,
        conditions: Sequence[Condition],
        ring: Callable[[BaseException], object],
        met: Iterable[Condition] = (),
    ) -> None:
        self.met = set(met)
        self._conditions = conditions
        self._ring = ring
        self._records: deque[Record] = deque()

    @property
    def is_behind(self) -> bool:
        """Whether records wait that were not looked at."""
        return bool(self._records)

    def judge(self, records: Iterable[Record]) -> None:
        """Look at some records, in the order of the run.

        If Ctrl-C ends it, the rest is looked at the next time.
        """
        if not self._conditions:
            return
        self._records.extend(records)
        while self._records:
            for condition in self._conditions:
                if condition not in self.met and self._records[0].name in condition.names:
                    self._apply(condition, self._records[0])
            self._records.popleft()

    def _apply(self, condition: Condition, record: Record) -> None:
        try:
            if not condition.when(record):
                return
            if condition.then is not None:
                condition.then(record)
                return
        except KeyboardInterrupt:
            raise
        except Exception as error:
            self.met.add(condition)
            logs.python.warning(
                "Options.observe: when or then failed and is called no more: %s: %s. The model "
                "keeps running.",
                *(type(error).__name__, error),
            )
            return
        except BaseException as error:  # such as that of sys.exit(): it is for the caller
            self.met.add(condition)
            self._ring(error)
            return
        self.met.add(condition)
        self._ring(RecordError(_text_of(record), record))


def _text_of(record: Record) -> str:
    found = record.statistics
    shown = {
        name: getattr(found, name)
        for name in ("mean", "std", "minimum", "maximum", "norm", "nans", "infs", "zeros")
    }
    numbers = ", ".join(f"{k} {v:.6g}" for k, v in shown.items() if v is not None)
    place = "" if record.micro_batch is None else f", micro-batch {record.micro_batch}"
    return (
        f"Options.observe: '{record.name}' met the condition `when` in device iteration "
        f"{record.step}{place}: {numbers}. The model can be called again."
    )
