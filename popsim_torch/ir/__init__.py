"""The program as data: a graph of named tensors and ops, independent of torch.fx and of C++."""

from popsim_torch.ir.graph import (
    Argument,
    Attribute,
    Graph,
    Op,
    Phase,
    Tensor,
    TensorArgument,
    TensorKind,
    TensorListArgument,
    contiguous_strides,
)
from popsim_torch.ir.text import to_text
from popsim_torch.ir.uses import Uses, walk
from popsim_torch.ir.verify import verify

__all__ = [
    "Argument",
    "Attribute",
    "Graph",
    "Op",
    "Phase",
    "Tensor",
    "TensorArgument",
    "TensorKind",
    "TensorListArgument",
    "Uses",
    "contiguous_strides",
    "to_text",
    "verify",
    "walk",
]
