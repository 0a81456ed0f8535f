"""The program as data: a graph of named tensors and ops, independent of torch.fx and of C++."""

from popsim_torch.ir.graph import (
    Argument,
    Attribute,
    Graph,
    Op,
    Phase,
    Role,
    Tensor,
    TensorArgument,
    TensorKind,
    TensorListArgument,
    contiguous_strides,
)
from popsim_torch.ir.origin import NOWHERE, Origin
from popsim_torch.ir.program import (
    Anchor,
    LoopCounts,
    Program,
    RunSettings,
    is_pipelined,
)
from popsim_torch.ir.schema import AttributeRule, Operand, OpInfo, OpTable
from popsim_torch.ir.tensor_info import select_tensors, tensor_infos
from popsim_torch.ir.text import ProgramText, program_text, to_text
from popsim_torch.ir.uses import Uses, graphs, walk, walk_all

__all__ = [
    "NOWHERE",
    "Anchor",
    "Argument",
    "Attribute",
    "AttributeRule",
    "Graph",
    "LoopCounts",
    "Op",
    "OpInfo",
    "OpTable",
    "Operand",
    "Origin",
    "Phase",
    "Program",
    "ProgramText",
    "Role",
    "RunSettings",
    "Tensor",
    "TensorArgument",
    "TensorKind",
    "TensorListArgument",
    "Uses",
    "contiguous_strides",
    "graphs",
    "is_pipelined",
    "program_text",
    "select_tensors",
    "tensor_infos",
    "to_text",
    "walk",
    "walk_all",
]
