"""The object that an executor returns for a parameter: it can set the replica grouping."""

from __future__ import annotations

from typing import Any

from torch import nn

from popsim_torch.enums import CommGroupType, VariableRetrievalMode
from popsim_torch.errors import Error, UsageAssertionError
from popsim_torch.executor.device_program import DeviceProgram
from popsim_torch.executor.replicas import groups_of

__all__ = ["ParameterProxy"]


class ParameterProxy:
    """A parameter at the top level of a model, as ``executor.<name>`` returns it.

    It is not a tensor. Its attributes are those of the parameter; the parameter itself is
    ``executor.model.<name>``.

    Args:
        device: The executor's program.
        model: The model that has the parameter.
        name: The parameter's name.
    """

    def __init__(self, device: DeviceProgram, model: nn.Module, name: str) -> None:
        self._device = device
        self._model = model
        self._name = name

    def replicaGrouping(
        self,
        comm_group_type: CommGroupType,
        shards: int,
        variable_retrieval_mode: VariableRetrievalMode,
    ) -> None:
        """Give each group of replicas its own value; call this before compilation.

        The parameter then has the values of the groups along its first dimension, and forward sees
        the value of one group, without that dimension. Its gradients are added up within a group;
        with ``ReductionType.Mean`` they are divided by the number of all gradients, as those of
        other weights. The states of the optimizer have the same first dimension.

        Args:
            comm_group_type: Which replicas form a group. ``All``, one value for all replicas, is
                the default, and the parameter has no dimension for it.
            shards: Number of replicas per group; ignored for ``All`` and ``NoGrouping``.
            variable_retrieval_mode: Whether to read back the value of the first replica of each
                group, or the values of all replicas, which fit the parameter only if each replica
                is a group.

        Raises:
            UsageAssertionError: An argument has the wrong type.
            Error: The model is compiled already, the parameter has no dimension or is not
                contiguous, or its first size is not the number of groups.
        """
        call = f"{self._name}.replicaGrouping({comm_group_type!r}, {shards!r}, ...)"
        if not isinstance(comm_group_type, CommGroupType) or not isinstance(
            variable_retrieval_mode, VariableRetrievalMode
        ):
            raise UsageAssertionError(
                f"{call}: pass a poptorch.CommGroupType, a number of replicas, and a "
                "poptorch.VariableRetrievalMode."
            )
        if not isinstance(shards, int):
            raise UsageAssertionError(f"{call}: the number of replicas must be an int.")
        parameter = self._parameter()
        if self._device.compiled is not None:
            raise Error(f"{call}: the model is compiled already. Call it before, or destroy().")
        if parameter.dim() == 0:
            raise Error(
                f"{call}: the parameter has no dimension for the groups. Give it the shape [groups]"
            )
        if not parameter.is_contiguous():
            raise Error(f"{call}: the parameter must be contiguous in memory.")
        replicas = self._device.options.replication_factor
        if comm_group_type in (CommGroupType.Consecutive, CommGroupType.Orthogonal) and (
            shards < 1 or replicas % shards
        ):
            raise Error(
                f"{call}: the number of replicas per group must divide the replication factor, "
                f"{replicas}."
            )
        if comm_group_type == CommGroupType.All:
            self._device.replica_groups.pop(self._name, None)
            return
        groups = groups_of(comm_group_type, shards, replicas)
        count = max(groups) + 1
        if parameter.shape[0] != count:
            formed = (
                "1 replica forms 1 group"
                if replicas == 1
                else f"{replicas} replicas form {count} group{'s' if count > 1 else ''}"
            )
            raise Error(
                f"{call}: {formed}, and the parameter has the shape "
                f"{tuple(parameter.shape)}. Give it the shape ({count}, ...), with the value of "
                "each group; forward sees the value of one, without the first dimension."
            )
        if variable_retrieval_mode == VariableRetrievalMode.AllReplicas and count != replicas:
            raise Error(
                f"{call}: VariableRetrievalMode.AllReplicas reads {replicas} values, one for each "
                f"replica, and the parameter has room for {count}. Use OnePerGroup: the replicas "
                "of a group have the same value."
            )
        self._device.replica_groups[self._name] = groups

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return getattr(self._parameter(), name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name}: {self._parameter()!r})"

    def _parameter(self) -> Any:
        return getattr(self._model, self._name)
