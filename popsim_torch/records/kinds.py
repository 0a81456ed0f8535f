"""What the kind and the name of a recorded tensor say of it."""

from __future__ import annotations

from popsim_torch.ir import names
from popsim_torch.records.tensors import (
    FURTHER_OUTPUT,
    GRADIENT_OF_OUTPUT,
    OUTPUT,
    RecordedTensor,
)

__all__ = ["are_alike", "is_given", "is_learned", "is_module_output"]

_ACTIVATION, _GRADIENT, _UPDATE = "activation", "gradient", "update"
_FAMILIES = {
    OUTPUT: _ACTIVATION,
    FURTHER_OUTPUT: _ACTIVATION,
    "recomputed": _ACTIVATION,
    "stashed": _ACTIVATION,
    GRADIENT_OF_OUTPUT: _GRADIENT,
    "updated weight": _UPDATE,
    "updated buffer": _UPDATE,
    "optimizer state": _UPDATE,
    "hyper-parameter": _UPDATE,
}
"""The kinds that may have another word in another run of the same model."""
_GIVEN = ("input", "hyper-parameter")
_LEARNED = ("weight", "buffer", "gradient", "updated weight", "updated buffer")


def are_alike(a: RecordedTensor, b: RecordedTensor) -> bool:
    """Return whether two tensors may be the same one, as far as shape and kind are known."""
    if None not in (a.shape, b.shape) and a.shape != b.shape:
        return False
    families = {_FAMILIES.get(one.kind, one.kind) for one in (a, b) if one.kind}
    return len(families) < 2


def is_given(tensor: RecordedTensor) -> bool:
    """Return whether the model gets a tensor, and does not make it: an input, a learning rate."""
    return tensor.kind in _GIVEN or (not tensor.kind and names.is_input(tensor.name))


def is_learned(tensor: RecordedTensor) -> bool:
    """Return whether a tensor is a weight or buffer, or its gradient or updated value."""
    lead, derived_from = names.lead_and_tensor(tensor.name)
    if ":" in derived_from or names.is_partial_gradient(tensor.name):
        return False
    return tensor.kind in _LEARNED if tensor.kind else bool(lead)


def is_module_output(tensor: RecordedTensor) -> bool:
    """Return whether PyTorch ran the model, and a module returned the tensor, or its gradient."""
    return tensor.kind in (OUTPUT, FURTHER_OUTPUT, GRADIENT_OF_OUTPUT)
