"""Selections of tensors: by name, by kind, by module, by dtype, or by a function.

A *selection* says which tensors of a program are meant. These are selections:

* a string: the name of a tensor, or a pattern for the whole name (``"Gradient___*.weight"``);
* a :class:`Glob`, which is always a pattern;
* a regular expression from ``re.compile``, which may match anywhere in the name;
* a function that takes a :class:`TensorInfo` and returns whether it is meant;
* what a function of this module returns, such as ``gradients()``; ``&``, ``|`` and ``~`` combine
  them with each other and with all of the above;
* a list of these: a tensor is meant if one of them means it.

``fit`` calls the model inside of a function, and adds ``model.`` to names: ``fc.weight`` is
``model.fc.weight``, and ``fc/Gemm:0`` is ``model/fc/Gemm:0``. A name, pattern or regular expression
that fits no name of a program is tried again with ``model.`` removed and added, so that a selection
means the same tensors in both.

Some tensors are computed only if they are asked for, such as the parts of an update. They have a
name and a kind, but no shape and no dtype: functions and ``of_dtype`` never mean one of these.
"""

from popsim_torch.tensors.info import TensorInfo
from popsim_torch.tensors.ready_made import (
    activations,
    buffers,
    gradients,
    inputs,
    of_dtype,
    of_module,
    of_stage,
    states,
    updates,
    weights,
)
from popsim_torch.tensors.selections import Glob, Selection

__all__ = [
    "Glob",
    "Selection",
    "TensorInfo",
    "activations",
    "buffers",
    "gradients",
    "inputs",
    "of_dtype",
    "of_module",
    "of_stage",
    "states",
    "updates",
    "weights",
]
