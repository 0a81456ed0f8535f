"""Records that wait for ``observations()``."""

from __future__ import annotations

from collections import deque

from popsim_torch.observe.record import Record

__all__ = ["KeptRecords"]

_MOST = 256 * 2**20
_FEW = 64 * 2**20


class KeptRecords:
    """The newest records that nobody has asked for yet.

    Attributes:
        lost: The number of records that were dropped, and that no sink has got either.
    """

    def __init__(self) -> None:
        self.lost = 0
        self._parts: deque[tuple[list[Record], int]] = deque()
        self._num_bytes = 0

    def add(self, records: list[Record], num_bytes: int, *, few: bool) -> None:
        """Keep records, and drop the oldest ones if they are too many.

        Args:
            records: The records.
            num_bytes: Their size.
            few: Whether to keep only few of them, since sinks get all.
        """
        self._parts.append((records, num_bytes))
        self._num_bytes += num_bytes
        while self._num_bytes > (_FEW if few else _MOST) and len(self._parts) > 1:
            dropped, size = self._parts.popleft()
            self._num_bytes -= size
            self.lost += 0 if few else len(dropped)

    @property
    def records(self) -> list[Record]:
        """The records, which stay."""
        return [record for records, _ in self._parts for record in records]

    def take(self) -> list[Record]:
        """Return the records, each once."""
        found = self.records
        self._parts.clear()
        self._num_bytes = 0
        return found
