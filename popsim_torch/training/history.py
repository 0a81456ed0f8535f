"""The result of a fit: the numbers of each epoch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from popsim_torch.executor.observing import Observing
from popsim_torch.observe.record import Record
from popsim_torch.options import Options

__all__ = ["EpochRecord", "History", "with_history"]


@dataclass(frozen=True)
class EpochRecord:
    """The numbers of an epoch.

    Attributes:
        epoch: The number of the epoch, counted from 0.
        means: The means of the loss and of each metric over all steps, by name; names of means over
            the validation data begin with ``val_``.
        seconds: The time of its steps, including compilation and callbacks of single steps, but not
            validation.
        compile_seconds: The part of this time for compilation, in the first epoch.
        samples: The number of samples in its batches.
    """

    epoch: int
    means: Mapping[str, float]
    seconds: float
    compile_seconds: float
    samples: int

    @property
    def samples_per_second(self) -> float:
        """Samples per second, without compilation."""
        return self.samples / max(self.seconds - self.compile_seconds, 1e-9)

    def line(self, title: str) -> str:
        """Return the epoch as one line of text."""
        loss, *others = (f"{name}: {mean:.3f}" for name, mean in self.means.items())
        parts = [title, f"Mean {loss}", *others, f"{self.seconds:.2f} s"]
        if self.compile_seconds:
            parts[-1] += f" ({self.compile_seconds:.2f} s to compile)"
        return ", ".join([*parts, f"{self.samples_per_second:.0f} samples/s"])


@dataclass
class History:
    """The result of :func:`fit`: ``history["loss"]`` has the mean loss of each epoch.

    It can be copied and pickled; a copy has the records that nobody has read yet.

    Attributes:
        epochs: One record for each epoch.
        anchors: The values that each anchor of the options recorded in the latest run of the
            device, by short name; of an anchor with a pattern a dict of its tensors by name.
    """

    epochs: list[EpochRecord] = field(default_factory=list)
    anchors: Mapping[str, Any] = field(default_factory=dict)
    _observing: Observing | _Unread | None = field(default=None, repr=False, compare=False)

    def observations(self) -> list[Record]:
        """Return the records that ``Options.observe`` asked for, each once.

        Raises:
            Error: The options observe nothing.
        """
        observing = Observing(Options()) if self._observing is None else self._observing
        return observing.observations()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_observing": _unread_of(self._observing)}

    def __getitem__(self, name: str) -> list[float]:
        """Return the means of the loss or of a metric, one for each epoch."""
        return [record.means[name] for record in self.epochs]

    def __len__(self) -> int:
        """Return the number of epochs."""
        return len(self.epochs)


class _Unread:
    """The records of a copied history.

    Args:
        records: The records, each of which is returned once.
    """

    def __init__(self, records: list[Record]) -> None:
        self._records = records

    def observations(self) -> list[Record]:
        """Return the records that were not returned before."""
        found, self._records = self._records, []
        return found


def _unread_of(observing: Observing | _Unread | None) -> _Unread | None:
    """Return the records that nobody has read yet, for a copy; None if nothing is observed."""
    if isinstance(observing, _Unread):
        return _Unread(list(observing._records))
    if observing is None or not observing.options._observations:
        return None
    return _Unread(observing.unread())


@contextlib.contextmanager
def with_history(history: History) -> Iterator[None]:
    """Give each exception that leaves this scope an attribute ``history``."""
    try:
        yield
    except BaseException as error:
        # Classes of the user may have an attribute of this name, or refuse new ones.
        if isinstance(getattr(error, "history", history), History):
            with contextlib.suppress(AttributeError):
                error.history = history  # type: ignore[attr-defined]
        raise
