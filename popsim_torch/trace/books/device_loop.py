"""The body of a device loop: a training step in the style of PyTorch programs.

In the body of ``repeat`` the user's own code says where gradients are computed and where weights
are updated: ``loss.backward()``, ``optimizer.zero_grad()``, ``optimizer.step()``. During the trace
of the body, these calls work on traced tensors as they do in PyTorch, except the update: the
program of the optimizer runs it, after all other work of the iteration.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from popsim_torch.errors import Error, UsageRuntimeError
from popsim_torch.private_torch.modes import DisableTorchFunction
from popsim_torch.private_torch.module_parts import own_buffers, own_parameters
from popsim_torch.trace.books.leaves import leaves_of
from popsim_torch.trace.books.left_gradients import LeftGradients
from popsim_torch.trace.books.optimizer_groups import parameters_of, values_of
from popsim_torch.trace.books.weight_steps import (
    StepInIteration,
    WeightStep,
    leave_to_the_end,
    record_step,
)
from popsim_torch.trace.graph.origin import user_line
from popsim_torch.trace.graph.traced_tensors import find_node, is_traced

__all__ = ["DeviceLoopBody", "DeviceLoopOptimizers", "DeviceLoopTrace", "UnknownObject"]

_logger = logging.getLogger("poptorch::python")
_CHANGED_IN_PLACE = "modified by an inplace operation"


class UnknownObject(Exception):
    """The body uses a module, parameter or optimizer that was not found before.

    Attributes:
        found: The object.
        where: The place of the use, as the beginning of a message; may be empty.
    """

    def __init__(self, found: object, where: str = "") -> None:
        super().__init__(f"the body of a loop uses a {type(found).__name__} that was not found")
        self.found, self.where = found, where


class DeviceLoopBody(nn.Module):
    """The body of a loop as a module, with all modules and parameters that it uses.

    Args:
        modules: The modules that the body calls, by name.
        parameters: The parameters that it uses outside of modules, by name.
        carried: The carried values of the first iteration.
        step: Called with the carried values and the inputs; returns the new carried values, and the
            condition for another iteration or None.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        parameters: Mapping[str, nn.Parameter],
        carried: Sequence[torch.Tensor],
        step: Callable[
            [list[torch.Tensor], Sequence[torch.Tensor]],
            tuple[Sequence[torch.Tensor], torch.Tensor | None],
        ],
    ) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)
        self.carried_names: list[str] = []
        for position, value in enumerate(carried):
            name = f"carried{position}"
            while name in modules or name in parameters:
                name += "_"
            self.register_buffer(name, value)
            self.carried_names.append(name)
        self._step = step

    def forget_step(self) -> None:
        """Drop the user's function and all objects that it refers to."""
        del self._step

    def forward(self, *inputs: torch.Tensor) -> None:
        """Run one iteration on the present carried values."""
        carried = [self._buffers[name] for name in self.carried_names]
        values, condition = self._step(carried, inputs)  # type: ignore[arg-type]
        if condition is not None:
            torch.ops.popsim.repeat_while(condition)
        with torch.no_grad():
            apart = [torch.ops.aten.lift_fresh_copy(value) for value in values]
            for target, value in zip(carried, apart, strict=True):
                target.copy_(value)  # type: ignore[union-attr]


@dataclass(frozen=True)
class DeviceLoopOptimizers:
    """The objects of a body that are known before the trace.

    Attributes:
        optimizers: The optimizers that the body may use.
    """

    optimizers: Sequence[torch.optim.Optimizer]


class HooksBehind(Protocol):
    """Runs the hooks that parameters have behind the accumulation of gradients."""

    def run_in_loop(self, name: str, traced: torch.Tensor, gradient: torch.Tensor) -> None:
        """Run the hooks of a parameter.

        Args:
            name: The name of the parameter.
            traced: The traced parameter, with the accumulated gradient.
            gradient: The gradient that was added last.
        """


@dataclass
class DeviceLoopTrace:
    """The effects of a loop's body on gradients and weights, recorded during its trace.

    Attributes:
        request: The objects of the body that are known before the trace.
        parameters: The traced parameters by name.
        known: Returns the traced tensor for a host tensor.
        backward_of: Returns a scope in which a backward pass runs.
        begin_call: Records that the next nodes belong to a user's call with this name.
        loss_scale: The factor of all gradients.
        has_backward: Whether the body computes gradients.
        losses: The losses, in order.
        steps: The calls of ``optimizer.step()``, by their key in the graph.
        staying: For each step that runs where it is called, by key: the place where its weights are
            read after it. The other steps run at the end of the iteration.
        computed_outside: Tensors that the function computed from weights outside of the loop.
        called: The modules that the body calls, by id.
        behind: Runs the hooks that parameters have behind the accumulation of gradients.
    """

    request: DeviceLoopOptimizers
    parameters: Mapping[str, torch.Tensor]
    known: Callable[[torch.Tensor], torch.Tensor]
    backward_of: Callable[[torch.Tensor], AbstractContextManager[None]]
    begin_call: Callable[[str], None]
    loss_scale: torch.Tensor
    has_backward: bool = False
    losses: list[torch.Tensor] = field(default_factory=list)
    steps: dict[int, WeightStep] = field(default_factory=dict)
    staying: dict[int, str] = field(default_factory=dict)
    computed_outside: list[torch.Tensor] = field(default_factory=list)
    called: dict[int, nn.Module] = field(default_factory=dict)
    behind: HooksBehind | None = None
    _left: LeftGradients = field(default_factory=LeftGradients)
    _unread: dict[int, torch.Tensor] = field(default_factory=dict)
    _backward_line: str = ""

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that the body steps, in order, each once."""
        return list({id(step.optimizer): step.optimizer for step in self.steps.values()}.values())

    @property
    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradient of each parameter that is updated at the end of the iteration, by name."""
        at_end = [step for key, step in self.steps.items() if key not in self.staying]
        return {name: gradient for step in at_end for name, gradient in step.gradients.items()}

    @property
    def steps_in_iteration(self) -> dict[int, StepInIteration]:
        """The steps that run where they are called, by key."""
        found = ((key, self.steps[key], used) for key, used in sorted(self.staying.items()))
        return {
            key: StepInIteration(tuple(step.gradients), step.source, used)
            for key, step, used in found
        }

    # Gradients.

    def backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Add gradients to the leaves that a loss depends on, as ``loss.backward()`` does.

        Raises:
            Error: The loss needs no gradient.
            RuntimeError: PyTorch refuses such a call; the message is PyTorch's.
        """
        if not loss.requires_grad or (loss.grad_fn is None and not loss.is_leaf):
            raise Error(
                f"backward(){user_line(' at ')}: the tensor of shape {tuple(loss.shape)} does not "
                "depend on any parameter that requires a gradient."
            )
        if gradient is None and loss.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        scale = self.loss_scale.to(loss.dtype)
        seed = scale.reshape(loss.shape) if gradient is None else self.known(gradient) * scale
        leaves = leaves_of(loss) if inputs is None else _as_list(inputs, self.known)
        self.has_backward = True
        self.losses.append(loss)
        self._backward_line = user_line(" at ")
        with self.backward_of(loss), self._explained():
            found = torch.autograd.grad(
                loss,
                leaves,
                seed,
                retain_graph=create_graph if retain_graph is None else retain_graph,
                create_graph=create_graph,
                allow_unused=True,
            )
            self._accumulate(leaves, found)

    def _accumulate(
        self, leaves: Sequence[torch.Tensor], found: Sequence[torch.Tensor | None]
    ) -> None:
        """Add gradients to those of the leaves, and call the hooks behind it."""
        for leaf, new in zip(leaves, found, strict=True):
            if new is not None:
                if any(leaf is one for one in self.computed_outside):
                    raise Error(
                        f"backward(){user_line(' at ')}: the loss depends on a weight through a "
                        f"tensor of shape {tuple(leaf.shape)} that was computed outside of the "
                        "loop. Gradients of an iteration do not get there. Compute the tensor in "
                        "the body, or use tensor.detach()."
                    )
                before = leaf.grad
                leaf.grad = new if before is None else before + new
                self._unread[id(leaf)] = leaf.grad
                self._left.add(leaf, self._backward_line)
                name = self._names.get(id(leaf))
                if name is not None and self.behind is not None:
                    self.behind.run_in_loop(name, leaf, new)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Add to autograd's error the step that changed a tensor which a backward pass needs."""
        try:
            yield
        except RuntimeError as error:
            if not self.steps or _CHANGED_IN_PLACE not in str(error):
                raise
            *_, step = self.steps.values()
            raise UsageRuntimeError(
                f"backward(){self._backward_line} needs the weights that the loss was computed "
                f"with, but optimizer.step(){step.source} has changed them since. Call step() "
                "after this backward(), or compute the loss after step(), with the new weights. "
                f"PyTorch says: {error}"
            ) from error

    # Optimizers.

    def zero_grad(self, optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        """Clear the gradients of an optimizer's parameters."""
        self._clear(parameters_of(optimizer), set_to_none)

    def _clear(self, parameters: Iterable[torch.Tensor], set_to_none: bool) -> None:
        with DisableTorchFunction():
            for parameter in parameters:
                self._left.clear(self.known(parameter), to_none=set_to_none)

    def notice_assigned(self, parameter: torch.Tensor) -> None:
        """Record an assignment ``parameter.grad = ...``.

        Args:
            parameter: The traced parameter, or any other tensor.
        """
        self._left.replace(parameter)

    def notice_read(self, parameter: torch.Tensor) -> None:
        """Record that the body reads ``parameter.grad``.

        Args:
            parameter: The traced parameter, or any other tensor.
        """
        name = self._names.get(id(parameter))
        if name is not None and not self._left.is_new(parameter):
            with DisableTorchFunction():
                self._left.use(parameter, name, f"parameter.grad{user_line(' at ')}")

    @functools.cached_property
    def _names(self) -> dict[int, str]:
        """The names of the traced parameters, by id."""
        return {id(tensor): name for name, tensor in self.parameters.items()}

    def step(self, optimizer: torch.optim.Optimizer, closure: Any = None) -> None:
        """Let an optimizer update its parameters.

        Raises:
            Error: The step is not supported; the message says why.
        """
        where = user_line(" at ")
        if closure is not None:
            raise Error(f"optimizer.step(closure){where}: closures are not supported in a loop.")
        gradients = {}
        for parameter in parameters_of(optimizer):
            traced = self.known(parameter)
            if not is_traced(traced):
                raise UnknownObject(parameter)
            name = self._names.get(id(traced))
            if name is None:
                raise Error(
                    f"optimizer.step(){where} is called in a function that poptorch.for_loop, "
                    "poptorch.cond or the like runs, which cannot change weights. Call it directly "
                    "in the body of repeat, or write a Python loop there."
                )
            with DisableTorchFunction():
                self._left.use(traced, name, f"optimizer.step(){where}")
                if traced.grad is not None:
                    gradients[name] = traced.grad
        if not gradients:
            raise Error(
                f"optimizer.step(){where}: none of its parameters has a gradient. Call "
                "loss.backward() before it, in the same iteration."
            )
        self._check_alone(optimizer, gradients, where)
        self.has_backward = True  # also if torch.autograd.grad has computed the gradients
        self.begin_call("OptimizerStep")
        weights = [self.parameters[name] for name in gradients]
        key = len(self.steps)
        nodes = record_step(weights, list(gradients.values()), key)
        self.steps[key] = WeightStep(optimizer, where, gradients, nodes)

    def _check_alone(
        self, optimizer: torch.optim.Optimizer, names: Iterable[str], where: str
    ) -> None:
        """Refuse a parameter that another optimizer updates."""
        others = [step for step in self.steps.values() if step.optimizer is not optimizer]
        taken = {name for step in others for name in step.gradients}
        for name in names:
            if name in taken:
                raise Error(
                    f"optimizer.step(){where}: another optimizer updates the parameter '{name}' "
                    "in the same iteration. Pass each parameter to only one optimizer."
                )

    def finish(self) -> None:
        """Check the whole body at its end, and move steps to the end of the iteration if possible.

        Raises:
            Error: Gradients would add up from one iteration to the next.
        """
        nodes = map(find_node, self._unread.values())
        if self.has_backward and not self.steps and not any(node and node.users for node in nodes):
            _logger.warning(
                "backward()%s has no effect: the body steps no optimizer and reads no gradient.",
                self._backward_line,
            )
        self._left.check()
        self.staying = leave_to_the_end(self.steps, self.parameters)

    @contextmanager
    def active(self, module: nn.Module) -> Iterator[None]:
        """Make the optimizers of the user's code call this object, in this scope.

        Args:
            module: The module with all known modules.
        """
        known = {id(child) for child in module.modules()}
        thread = threading.get_ident()  # PyTorch calls these hooks in all threads

        def refuse_optimizer(optimizer: torch.optim.Optimizer, *_: object) -> None:
            if threading.get_ident() == thread:
                raise UnknownObject(optimizer)

        def look(child: nn.Module, _args: object) -> None:
            if threading.get_ident() != thread:
                return
            self.called[id(child)] = child
            if id(child) in known:
                return
            # A container of known modules, such as a slice of a Sequential, is not new.
            if any(id(part) not in known and _has_own_state(part) for part in child.modules()):
                raise UnknownObject(child)

        with contextlib.ExitStack() as stack:
            for handle in (
                register_module_forward_pre_hook(look),
                register_optimizer_step_pre_hook(refuse_optimizer),
            ):
                stack.callback(handle.remove)
            for optimizer in self.request.optimizers:
                stack.enter_context(self._standing_in(optimizer))
            stack.enter_context(self._clearing(module))
            yield

    @contextmanager
    def _clearing(self, module: nn.Module) -> Iterator[None]:
        """Replace ``zero_grad`` of all modules: PyTorch's own would find no gradients at first."""
        parts = [part for part in module.modules() if "zero_grad" not in vars(part)]
        for part in parts:
            vars(part)["zero_grad"] = functools.partial(self._zero_module, part)
        try:
            yield
        finally:
            for part in parts:
                del vars(part)["zero_grad"]

    def _zero_module(self, module: nn.Module, set_to_none: bool = True) -> None:
        self._clear(module.parameters(), set_to_none)

    @contextmanager
    def _standing_in(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Replace the methods of one optimizer; a scheduler may have replaced them before."""
        own = vars(optimizer)
        saved: dict[str, Any] = {name: own[name] for name in ("step", "zero_grad") if name in own}
        values = values_of(optimizer)

        def step(closure: Any = None) -> None:
            self.step(optimizer, closure)

        def zero_grad(set_to_none: bool = True) -> None:
            self.zero_grad(optimizer, set_to_none)

        own["step"], own["zero_grad"] = step, zero_grad
        try:
            yield
            if values_of(optimizer) != values:
                for group, before in zip(optimizer.param_groups, values, strict=False):
                    group.update(before)
                raise Error(
                    f"The body of the loop changes the values of the optimizer "
                    f"{type(optimizer).__name__}, for example by scheduler.step(): that would "
                    "happen once, during the trace of the body. Change them between calls of the "
                    "function."
                )
        finally:
            for name in ("step", "zero_grad"):
                del own[name]
            own.update(saved)


def _has_own_state(module: nn.Module) -> bool:
    own = [*own_parameters(module).values(), *own_buffers(module).values()]
    return any(tensor is not None for tensor in own)


def _as_list(inputs: Any, known: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    tensors = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    return [known(tensor) for tensor in tensors]
