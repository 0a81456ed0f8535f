"""The origin of the nodes that are made next: the call of user code that is being recorded."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from popsim_torch.ir import Origin
from popsim_torch.stages import StageAssigner
from popsim_torch.trace.books.device_loop import DeviceLoopTrace
from popsim_torch.trace.books.regions import Regions
from popsim_torch.trace.books.scopes import Scopes
from popsim_torch.trace.graph.origin import current_origin, set_origin, user_line

__all__ = ["CallOrigins"]


class CallOrigins:
    """The origin of the current call, put together from its parts.

    Args:
        scopes: Knows the scope of the current call.
        stages: Knows the pipeline stage of the current call.
        location_excludes: Parts of file paths; lines of such files are no origin.

    Attributes:
        current: The origin of the current call.
        scopes: See above.
        regions: The parts of forward that user code has put a scope around.
        loop: The device loop, if its body is traced.
        in_backward: Whether a backward pass runs that is not a part of forward.
    """

    def __init__(
        self, scopes: Scopes, stages: StageAssigner, location_excludes: Sequence[str]
    ) -> None:
        self._stages = stages
        self._location_excludes = location_excludes
        self._calls = itertools.count(1)
        self.scopes = scopes
        self.regions = Regions()
        self.current = Origin()
        self.loop: DeviceLoopTrace | None = None
        self.in_backward = False

    def begin(self, op_type: str | None = None, multi_conv: int = 0) -> None:
        """Record that the nodes made next belong to a new call of user code.

        Args:
            op_type: The type of the op that is called, for operations of this package.
            multi_conv: Number of the group of convolutions that the call belongs to.
        """
        source = user_line(excludes=self._location_excludes)
        if self.in_backward:  # code of the user in a backward pass belongs to the call it is of
            present = current_origin()
            self.current = replace(
                present,
                backward=True,
                op_type=op_type,
                source=source or present.source,
                call=next(self._calls),
                multi_conv=multi_conv,
            )
            set_origin(self.current)
            return
        self.current = Origin(
            self.scopes.current,
            self._stages.current_stage(),
            self.in_backward or (self.loop is not None and self.loop.has_backward),
            op_type,
            source,
            next(self._calls),
            self.regions.rebuilt,
            multi_conv,
        )
        set_origin(self.current)

    def return_to(self, calling: Origin) -> None:
        """Record that the nodes made next belong to an earlier call again."""
        self.current = calling
        set_origin(calling)

    def position(self, stage: int) -> int:
        """Return the position of a stage in the pipeline."""
        return self._stages.position(stage)

    def backward(self) -> Origin:
        """Return the origin for the gradient nodes of the current call."""
        return replace(self.current, backward=True, op_type=None)
