"""Joins the gradients of a loss over classes and of the log-softmax below it.

The gradient with regard to the log-probabilities is zero but for one class of each sample. Where
only the gradient of a log-softmax reads it, one op computes both and the zeros are never written.
Values stay the same to the last bit: the op rounds in between as the two do.
"""

from __future__ import annotations

from popsim_torch.ir import Graph, Op, TensorKind, Uses


def fuse_loss_gradient(graph: Graph) -> int:
    """Fuse ``nll_loss_grad`` ops into ``softmax_grad`` ops, in place.

    Args:
        graph: Complete, returns included: a tensor that is copied to the host has a reader more.
            Names of tensors that are no longer computed stay in the graph.

    Returns:
        The number of ops that became part of another one.
    """
    uses = Uses(graph)
    losses = {op.outputs[0]: op for op in graph.ops if op.kind == "nll_loss_grad"}
    fused: set[int] = set()
    for op in graph.ops:
        if op.kind != "softmax_grad" or not op.attributes["log"] or op.attributes["axis"] != 1:
            continue
        tensor = graph.tensors[op.inputs[0]]
        root = graph.root(tensor)
        loss = losses.get(root.id)
        if (
            loss is not None
            and uses.only_reader(root.id) is op
            and root.kind == TensorKind.VALUE
            and tensor.shape == root.shape
            and tensor.covers(root)
            and (loss.phase, loss.stage) == (op.phase, op.stage)
            and loss.attributes["dtype"] == op.attributes["dtype"]
        ):
            _absorb(op, loss)
            fused.add(id(loss))
    graph.ops = [op for op in graph.ops if id(op) not in fused]
    return len(fused)


def _absorb(op: Op, loss: Op) -> None:
    attributes = {name: loss.attributes[name] for name in ("reduction", "ignore_index", "classes")}
    op.kind = "cross_entropy_grad"
    op.inputs = [*loss.inputs, op.inputs[1]]
    op.attributes = {**attributes, "dtype": op.attributes["dtype"]}
