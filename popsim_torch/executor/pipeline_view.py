"""The executor's methods that show a pipeline: its schedule, its stages, recorded runs."""

from __future__ import annotations

from popsim_torch import _native
from popsim_torch.errors import Error, UsageTypeError
from popsim_torch.executor.device_program import DeviceProgram
from popsim_torch.executor.profile import Profile
from popsim_torch.executor.schedule import Schedule, read_schedule
from popsim_torch.executor.stage_table import StageTable, describe_stages
from popsim_torch.executor.timeline import Timeline, read_timeline

__all__ = ["PipelineView"]


class PipelineView:
    """The part of an executor or loop that shows how its stages work.

    Args:
        device: The program.
    """

    def __init__(self, device: DeviceProgram) -> None:
        self._device = device

    def schedule(self) -> Schedule:
        """Return which stage works on which micro-batch in which time slot.

        ``print`` shows it as a grid, with a line for each stage; ``plot()`` draws it. If a run has
        been recorded (``record_timeline``), ``plot()`` draws it, too.

        Raises:
            Error: The model is not compiled.
        """
        compiled = self._device.require_compiled("schedule")
        return read_schedule(compiled, self._latest())

    def stages(self, profile: Profile | None = None) -> StageTable:
        """Return a table of the stages: modules, parameters, bytes, times, IPU, thread.

        Args:
            profile: The result of ``executor.profile(...)``. Its times are shown instead of those
                of the latest recorded run (``record_timeline``).

        Raises:
            Error: The model is not compiled.
            UsageTypeError: ``profile`` is not a profile.
        """
        compiled = self._device.require_compiled("stages")
        if profile is not None and not isinstance(profile, Profile):
            raise UsageTypeError(
                f"stages: the profile is a {type(profile).__name__}. Pass the result of "
                "executor.profile(...)."
            )
        device = self._device
        return describe_stages(device.module, compiled, device.options, self._latest(), profile)

    def record_timeline(self, on: bool = True) -> None:
        """Record when each stage begins and ends its work, in all runs from now on.

        ``timeline()`` returns the latest run. Recording reads the clock twice for each action, and
        keeps 16 bytes for it. It changes no value.

        Args:
            on: False to stop recording; forgets the recorded run.

        Raises:
            Error: The model is not compiled, or runs in another thread, or has more than 10 million
                actions in a call.
        """
        compiled = self._device.require_compiled("record_timeline")
        with _native.translated_errors():
            compiled.executable.record(bool(on))
        self._device.keeps_timeline = bool(on)

    def timeline(self) -> Timeline:
        """Return when each stage began and ended its work in the latest recorded run.

        Raises:
            Error: The model is not compiled, or no run has been recorded.
        """
        self._device.require_compiled("timeline")
        found = self._latest()
        if found is None:
            raise Error(
                "timeline: no complete run has been recorded. Call record_timeline(), then call "
                "the model."
            )
        return found

    def _latest(self) -> Timeline | None:
        compiled = self._device.compiled
        assert compiled is not None
        if not self._device.keeps_timeline:
            return None  # (a report may have recorded runs for itself)
        with _native.translated_errors():
            recorded = compiled.executable.timeline()
        return None if recorded is None else read_timeline(compiled, recorded)
