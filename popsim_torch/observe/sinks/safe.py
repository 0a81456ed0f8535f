"""Keeps a failing sink from stopping a training."""

from __future__ import annotations

from collections.abc import Sequence

from popsim_torch import logs
from popsim_torch.errors import UsageTypeError
from popsim_torch.observe.record import Record, RecordSink
from popsim_torch.queue_state import QueueState

__all__ = ["SafeSink"]


class SafeSink:
    """A sink that passes everything on to another one until that raises an exception.

    Then it warns once, with the class of the sink and the error, closes it, and calls it no more.

    Args:
        sink: The other sink.
        name: How warnings call it; by default the name of its class.

    Raises:
        UsageTypeError: It has no ``write_records`` or no ``close``.
    """

    def __init__(self, sink: RecordSink, name: str = "") -> None:
        if isinstance(sink, type):
            raise UsageTypeError(
                f"add_sink: the class {sink.__name__} is no sink. Pass an object of it, such as "
                f"{sink.__name__}(...)."
            )
        for method in ("write_records", "close"):
            if not callable(getattr(sink, method, None)):
                raise UsageTypeError(
                    f"add_sink: a {type(sink).__name__} has no method {method}. Pass a sink of "
                    "records, such as a poptorch.SummaryFile or a poptorch.HtmlPage."
                )
        self.sink = sink
        self.name = name or type(sink).__name__
        """How warnings call it."""
        self.error: Exception | None = None
        """What the sink raised; None as long as it works."""
        self._closed = False

    def write_records(self, records: Sequence[Record]) -> None:
        """Pass records on."""
        self._tell("write_records", records)

    def records_dropped(self, count: int) -> None:
        """Tell the sink how many records were dropped so far, if it has a method for it.

        Args:
            count: The number of records since the beginning.
        """
        self._tell("records_dropped", count)

    @property
    def shows_queues(self) -> bool:
        """Whether the sink has a method for the queues of a program."""
        return callable(getattr(self.sink, "show_queues", None))

    def show_queues(self, states: Sequence[QueueState]) -> None:
        """Tell the sink how full the queues of the program are, if it has a method for it.

        Args:
            states: A state for each queue.
        """
        self._tell("show_queues", states)

    def close(self) -> None:
        """Close the sink, once."""
        if self._closed:
            return
        self._closed = True
        try:
            self.sink.close()
        except Exception as error:
            self._give_up(error, "may not have written everything")

    def _tell(self, method: str, argument: object) -> None:
        """Call a method of the sink if it has it; close the sink if that fails."""
        tell = getattr(self.sink, method, None)
        if self.error is not None or self._closed or not callable(tell):
            return
        try:
            tell(argument)
        except Exception as error:
            self._give_up(error, "gets no more records")
            self._close_quietly()

    def _give_up(self, error: Exception, consequence: str) -> None:
        self.error = error
        logs.python.warning(
            "The sink %s failed and %s: %s: %s. The model keeps running.",
            self.name,
            consequence,
            type(error).__name__,
            str(getattr(error, "message", error)).removesuffix("."),
        )

    def _close_quietly(self) -> None:
        """Close a sink that has failed; what it raises now follows from the first error."""
        self._closed = True
        try:
            self.sink.close()
        except Exception as error:
            logs.python.info("Closing %s failed, too: %s", self.name, error)
