"""Traces the ``step`` of any optimizer, so that a program updates weights as it does.

``derive`` runs the step of a copy of the optimizer on tensors without values. Its operations become
a graph from weights, gradients, states and hyper-parameters to new weights and states: an
``optim.formula.UpdateFormula``. ``cells`` finds the states, ``numbers`` represents Python's numbers
that only a run knows, and ``functions`` gives PyTorch's functions tensors in place of these.
``updates`` makes the updates of a plan from that.
"""

from popsim_torch.optimizer_steps.updates import trace_updates

__all__ = ["trace_updates"]
