"""Which side has the newer weights: the host, the device, or another executor's device."""

from __future__ import annotations

import itertools
import logging
import weakref

from torch import nn

from popsim_torch.executor import host_weights
from popsim_torch.executor.device_state import DeviceState

_logger = logging.getLogger("poptorch::python")
_versions = itertools.count(1)


class _Living:
    """The ``WeightSync`` objects that are alive; each call looks through them.

    Attributes:
        num_added: Number of objects added so far.
    """

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[WeightSync]] = {}
        self.num_added = 0

    def add(self, one: WeightSync) -> None:
        key, references = id(one), self._references
        references[key] = weakref.ref(one, lambda _: references.pop(key, None))
        self.num_added += 1

    def discard(self, one: WeightSync) -> None:
        self._references.pop(id(one), None)

    def __bool__(self) -> bool:
        return bool(self._references)

    def all(self) -> list[WeightSync]:
        """Return all living objects; other threads may add and remove objects at the same time."""
        found = [reference() for reference in tuple(self._references.values())]
        return [one for one in found if one is not None]


# Weights of training executors; other executors may need to fetch them.
_trainers = _Living()
_loops = _Living()


class WeightSync:
    """Knows, for one executor, which side has the newer weights.

    Args:
        module: The module with the executor's parameters.
        fixed: Whether the weights are always those of the compilation, as for a loop.
    """

    def __init__(self, module: nn.Module, *, fixed: bool = False) -> None:
        self._module = module
        self._fixed = fixed
        self._state: DeviceState | None = None
        self._host_version = 0
        self._shares: weakref.WeakKeyDictionary[WeightSync, bool] = weakref.WeakKeyDictionary()
        # For a loop: the programs that may train its weights, and the number known at that time.
        self._others: list[weakref.ref[WeightSync]] = []
        self._num_known = 0
        self._seen: weakref.WeakKeyDictionary[WeightSync, int] = weakref.WeakKeyDictionary()

    @property
    def ahead(self) -> bool:
        """Whether the device has changed weights since they were copied, or is changing them."""
        return self._state is not None and self._state.ahead

    @property
    def has_loops(self) -> bool:
        """Whether there are loops that train."""
        return bool(_loops)

    def announce(self, *, loop: bool = False) -> None:
        """Tell other executors that this one trains.

        Args:
            loop: Whether this is a loop of a function. Other training programs take over the
                weights that a loop has trained. From other programs they take over nothing.
        """
        _trainers.add(self)
        if loop:
            _loops.add(self)

    def attach(self, state: DeviceState) -> None:
        """Record a device that has the host's weights."""
        self._state = state

    def detach(self) -> None:
        """Forget the device; from now on nobody fetches weights from it."""
        self._state = None
        _trainers.discard(self)
        _loops.discard(self)

    def upload(self) -> None:
        """Copy the host's weights to the device."""
        assert self._state is not None
        self._state.upload_weights()

    def download(self, *, what_fits: bool = False) -> None:
        """Copy the device's weights to the host.

        Args:
            what_fits: Leave out the weights whose host tensors have changed their shape.
        """
        assert self._state is not None
        self._state.download_weights(what_fits=what_fits)
        self._host_version = next(_versions)

    def fetch(self, *, what_fits: bool = False) -> bool:
        """Copy the weights to the host if the device has newer ones; return whether it did."""
        if not self.ahead:
            return False
        _logger.debug("Implicit copyWeightsToHost()")
        self.download(what_fits=what_fits)
        return True

    def pull(self, *, loops_alone: bool = False) -> None:
        """Upload weights that another training executor of the same parameters has changed.

        Args:
            loops_alone: Whether to look only at the weights of loops.
        """
        if self._fixed:
            others = self._known_others()
        elif _trainers:
            others = [
                one for one in (_loops if loops_alone else _trainers).all() if one is not self
            ]
        else:
            return
        if not others:
            return
        newer = False
        for trainer in others:
            version = self._seen.get(trainer, 0)
            # The fast path of most calls; the check for shared weights below is slow.
            if not trainer.ahead and version == trainer._host_version:
                continue
            if trainer._state is None or not self._shares_weights_with(trainer):
                continue
            trainer.fetch()
            if version != trainer._host_version:
                self._seen[trainer] = trainer._host_version
                newer = True
        if newer:
            _logger.debug("Implicit copyWeightsToDevice()")
            self.upload()

    def _known_others(self) -> list[WeightSync]:
        """Return the programs that may train a loop's weights; for other loops, check only once."""
        num_added = _trainers.num_added
        if self._num_known != num_added:
            self._others = [
                weakref.ref(one)
                for one in _trainers.all()
                if one is not self and not (one._fixed and not self._shares_weights_with(one))
            ]
            self._num_known = num_added
        return [one for reference in self._others if (one := reference()) is not None]

    def let_trainers_catch_up(self) -> None:
        """Fetch the weights that other training executors of the same parameters have changed."""
        for trainer in _trainers.all():
            if trainer is not self and self._shares_weights_with(trainer):
                trainer.fetch()
                self._seen[trainer] = trainer._host_version

    def _shares_weights_with(self, trainer: WeightSync) -> bool:
        if not (self._fixed or trainer._fixed):
            return self._has_weights_of(trainer)
        if trainer not in self._shares:
            self._shares[trainer] = self._has_weights_of(trainer)
        return self._shares[trainer]

    def _has_weights_of(self, trainer: WeightSync) -> bool:
        # Only compares identities: the values may be on a device that is busy.
        with host_weights.without_sync():
            own = {id(parameter) for parameter in self._module.parameters()}
            return any(id(parameter) in own for parameter in trainer._module.parameters())
