"""Records a run of a program in a folder."""

from __future__ import annotations

from collections.abc import Sequence

from popsim_torch.executor.device_program import DeviceProgram
from popsim_torch.executor.inspection import Inspection
from popsim_torch.ir import Phase
from popsim_torch.observe.record import Record
from popsim_torch.records import RunWriter
from popsim_torch.tensors import TensorInfo

__all__ = ["ProgramRecorder"]

_GIVEN = ("input", "weight", "hyper-parameter")
"""The kinds of tensors that a device iteration does not compute."""


class ProgramRecorder:
    """A sink that writes a run, and says what its tensors are once they are known.

    Args:
        writer: Writes the run.

    Attributes:
        device: The program that it records; None until there is one.
    """

    def __init__(self, writer: RunWriter) -> None:
        self.device: DeviceProgram | None = None
        self._writer = writer
        self._is_described = False

    def write_records(self, records: Sequence[Record]) -> None:
        """Pass records on."""
        if not self._is_described:
            self._is_described = True
            self._writer.describe(self._in_order())
        # An iteration that Options.watch ended may be called again.
        self._writer.write_records(records, replace=True)

    def _in_order(self) -> list[TensorInfo]:
        """Return the tensors in the order in which a difference of two runs spreads."""
        assert self.device is not None
        inspection = Inspection(self.device)
        infos = {one.name: one for one in inspection.names()}
        given = [one.name for one in infos.values() if one.kind in _GIVEN]
        observer = inspection.compiled.observer
        blocks = () if observer is None else observer.blocks
        # What forward computes of weights alone is observed where weights are, in the update.
        for block in blocks:
            if block.phase == Phase.UPDATE:
                names = [one.name for one in block.tensors]
                given += [name for name in names if infos[name].phase == "forward"]
        made = [one.name for block in blocks for one in block.tensors]
        return [infos[name] for name in dict.fromkeys([*given, *made, *infos])]

    def close(self) -> None:
        """Close the writer."""
        self._writer.close()
