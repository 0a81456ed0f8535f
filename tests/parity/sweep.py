"""Runs PyTorch's own sample inputs of operators and modules on the device; a script of its own.

``python -m tests.parity.sweep ops 0`` works through the operators from number 0 on and prints one
JSON line when it begins a case and one when it has its outcome, so that whoever reads them knows
what a process that died was doing. Outcomes:

- ``passed``: forward and gradients agree with eager PyTorch.
- ``unsupported``: an ``Error`` that says so, when the model is compiled.
- ``unclear``: any other exception.
- ``wrong``: different values, shapes or types, a missing gradient, or an ``InternalError``: the
  program was wrong, and refused.
- ``skipped``: eager PyTorch fails, or the sample is not one for this device (empty tensors,
  sparse layouts).
"""

import copy
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import popsim_torch as poptorch
from popsim_torch.errors import InternalError
from popsim_torch.files.operators import REFUSED, check_operators, foreign_operators
from tests.parity.tolerances import SWEEP

SAMPLES = 4
# Their results are whatever the memory holds; bfloat16 is float32 on the device.
_OTHER_VALUES = ("bfloat16", "empty", "new_empty")


@dataclass(frozen=True)
class Probe:
    """A call whose forward and backward are compared.

    Attributes:
        name: What is reported.
        function: What to call.
        arguments: Its positional and keyword arguments.
        module: Called instead of ``function``; its parameters get gradients too.
        compare_values: False where only shapes and types mean something.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    module: nn.Module | None = None
    compare_values: bool = True


class Skipped(Exception):
    """The sample says nothing about the device."""


class Wrong(Exception):
    """The device gave another result."""


class ProbeModel(nn.Module):
    """A probe as a model: what needs gradients are parameters, other tensors are inputs."""

    def __init__(self, probe: Probe, grad: bool) -> None:
        super().__init__()
        self.module = copy.deepcopy(probe.module)
        self.function = probe.function if self.module is None else self.module
        leaves, self.structure = tree_flatten(probe.arguments)
        self.leaves: list[Any] = []
        self.inputs: list[torch.Tensor] = []
        self.grad = grad
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                self.leaves.append(leaf)
            elif leaf.requires_grad:
                name = f"p{len(self.leaves)}"
                self.register_parameter(name, nn.Parameter(leaf.detach().clone()))
                self.leaves.append(("parameter", name))
            else:
                self.leaves.append(("input", len(self.inputs)))
                self.inputs.append(leaf.detach().clone())

    def forward(self, *inputs: torch.Tensor) -> Any:
        def given(leaf: Any) -> Any:
            if not isinstance(leaf, tuple) or len(leaf) != 2:
                return leaf
            if leaf[0] == "parameter":
                # The functions of some samples change their argument.
                return getattr(self, leaf[1]).view_as(getattr(self, leaf[1]))
            return inputs[leaf[1]] if leaf[0] == "input" else leaf

        args, kwargs = tree_unflatten([given(leaf) for leaf in self.leaves], self.structure)
        results = [r for r in tree_leaves(self.function(*args, **kwargs)) if is_result(r)]
        if not self.grad:
            return results
        return results, poptorch.identity_loss(_scalar_of(results), "none")


def is_result(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _scalar_of(results: list[torch.Tensor]) -> torch.Tensor:
    """Return a number whose gradient differs from element to element."""
    parts = []
    for result in results:
        if result.requires_grad and result.is_complex():
            result = torch.view_as_real(result.resolve_conj())
        if result.requires_grad and result.is_floating_point():
            weights = torch.linspace(0.5, 1.5, result.numel(), device=result.device)
            parts.append((result.float() * weights.view(result.shape)).sum())
    if not parts:
        raise Skipped("no differentiable result")
    return torch.stack(parts).sum()


def _check_sample(probe: Probe) -> None:
    tensors = [leaf for leaf in tree_leaves(probe.arguments) if isinstance(leaf, torch.Tensor)]
    if probe.module is not None:
        tensors += list(probe.module.parameters())
    for tensor in tensors:
        if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
            raise Skipped("lazy")
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.numel() == 0:
            raise Skipped("not a dense tensor with elements")


def _run_eager(probe: Probe, grad: bool, seed: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
    torch.manual_seed(seed)
    model = ProbeModel(probe, grad)
    inputs = [tensor.clone() for tensor in model.inputs]
    if not grad:
        with torch.no_grad():
            return model(*inputs), {}
    results, loss = model(*inputs)
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return [result.detach() for result in results], gradients


def _reference(probe: Probe) -> tuple[bool, list[torch.Tensor], dict[str, Any]]:
    """Return whether there are gradients, the results, and the gradients."""
    leaves = [leaf for leaf in tree_leaves(probe.arguments) if isinstance(leaf, torch.Tensor)]
    has_parameters = any(leaf.requires_grad for leaf in leaves) or (
        probe.module is not None and any(p.requires_grad for p in probe.module.parameters())
    )
    if has_parameters:
        try:
            return True, *_run_eager(probe, True, 0)
        except Exception:
            pass
    try:
        return False, *_run_eager(probe, False, 0)
    except Exception as error:
        raise Skipped(f"eager: {type(error).__name__}") from error


def _is_random(probe: Probe, grad: bool, results: list[torch.Tensor]) -> bool:
    def is_same(other: list[torch.Tensor]) -> bool:
        return all(
            torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(results, other, strict=True)
        )

    # (numbers that choose among a few places may be the same twice)
    return not all(is_same(_run_eager(probe, grad, seed)[0]) for seed in range(1, 9))


def _compare(what: str, ours: torch.Tensor, expected: torch.Tensor, values: bool) -> None:
    expected = expected.detach().resolve_conj().resolve_neg()
    if expected.dtype in (torch.float64, torch.bfloat16):
        expected = expected.float()
    if expected.dtype == torch.complex128:
        expected = expected.to(torch.complex64)
    if expected.dtype == torch.int64:
        expected = expected.int()
    if ours.dtype != expected.dtype or ours.shape != expected.shape:
        raise Wrong(
            f"{what}: {ours.dtype} {tuple(ours.shape)}, "
            f"expected {expected.dtype} {tuple(expected.shape)}"
        )
    if not values:
        return
    try:
        torch.testing.assert_close(ours, expected, equal_nan=True, **SWEEP.of(expected))
    except AssertionError as error:
        raise Wrong(f"{what}: {' '.join(str(error).split())}") from error


def _check_file(device: poptorch.PoplarExecutor) -> None:
    """Check that a file may call what the program calls, as it calls it."""
    graph = device.compiled.program.graph
    foreign = set(foreign_operators(graph))
    if not foreign <= REFUSED.keys():
        raise Wrong(f"no file may call {sorted(foreign - REFUSED.keys())}")
    if not foreign:
        try:
            check_operators(graph)
        except ValueError as error:
            raise Wrong(f"in a file: {error}") from error


def _options(gradients: dict[str, Any]) -> poptorch.Options:
    options = poptorch.Options()
    options.showCompilationProgressBar(False)
    for name in gradients:
        options.anchorTensor(name, f"Gradient___{name}")
    return options


def run_probe(probe: Probe) -> None:
    """Compare one probe; says by exception that it did not pass."""
    _check_sample(probe)
    grad, results, gradients = _reference(probe)
    if any(result.layout is not torch.strided or result.numel() == 0 for result in results):
        raise Skipped("empty or sparse result")
    values = probe.compare_values and not _is_random(probe, grad, results)
    model = ProbeModel(probe, grad)
    if grad:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        device = poptorch.trainingModel(model, _options(gradients), optimizer)
        ours, _ = device(*model.inputs)
    else:
        device = poptorch.inferenceModel(model, _options({}))
        ours = device(*model.inputs)
    _check_file(device)
    of_device = list(ours), {name: device.getAnchoredTensor(name) for name in gradients}
    try:
        _compare_all(of_device, (results, gradients), values)
    except Wrong:
        # The rounding errors may be eager PyTorch's.
        _compare_all(of_device, _in_double_precision(probe, grad), values)


_All = tuple[list[torch.Tensor], dict[str, torch.Tensor]]


def _compare_all(ours: _All, expected: _All, values: bool) -> None:
    for i, (result, other) in enumerate(zip(ours[0], expected[0], strict=True)):
        _compare(f"result {i}", result, other, values)
    for name, other in expected[1].items():
        _compare(f"gradient of {name}", ours[1][name], other, values)


def _in_double_precision(probe: Probe, grad: bool) -> _All:
    """Return the results and gradients of eager PyTorch with 64-bit numbers.

    Raises:
        Wrong: There are none.
    """
    wide = {torch.float32: torch.float64, torch.complex64: torch.complex128}

    def widened(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dtype not in wide:
            return leaf
        return leaf.detach().to(wide[leaf.dtype]).requires_grad_(leaf.requires_grad)

    arguments = tree_map(widened, probe.arguments)
    module = None if probe.module is None else copy.deepcopy(probe.module).double()
    try:
        return _run_eager(replace(probe, arguments=arguments, module=module), grad, 0)
    except Exception as error:
        raise Wrong(f"not with 64-bit numbers: {type(error).__name__}: {error}") from error


def _spread(samples: list[Any], count: int) -> list[Any]:
    """Return up to ``count`` of the samples, from all over the list."""
    if len(samples) <= count:
        return samples
    return [samples[i * (len(samples) - 1) // (count - 1)] for i in range(count)]


def _arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # Without a device a tensor made by the sample is the simulated device's.
    kwargs = {name: value for name, value in sample.kwargs.items() if name != "device"}
    return (sample.input, *sample.args), kwargs


def _processed(function: Callable[..., Any], process: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: process(function(*args, **kwargs))


def _on_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *args, **kwargs: function(x.clone(), *args, **kwargs)


def _with_grad(value: Any) -> Any:
    """Let floating-point tensors of a sample take gradients."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().clone().requires_grad_()
    return value


def operator_probes(dtype: torch.dtype) -> list[tuple[str, Callable[[], Iterator[Probe]]]]:
    from tests.pytorch_databases import invocations

    # Random operators would start from the same seed in every call and so not look random.
    invocations.wrapper_set_seed = lambda function, *args, **kwargs: function(*args, **kwargs)

    def probes(op: Any) -> Iterator[Probe]:
        grad = op.supports_autograd
        grad = grad and dtype in op.supported_backward_dtypes("cpu")
        samples = list(op.sample_inputs("cpu", dtype, requires_grad=grad))
        values = not op.name.startswith(_OTHER_VALUES)
        name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
        for sample in _spread(samples, SAMPLES):
            function = _processed(op.op, sample.output_process_fn_grad)
            yield Probe(name, function, _arguments(sample), compare_values=values)
        if op.inplace_variant is not None:
            function = _on_copy(op.inplace_variant)
            arguments = _arguments(samples[0])
            yield Probe(f"{name} in place", function, arguments, compare_values=values)

    ops = [op for op in invocations.op_db if dtype in op.dtypes]
    return [(op.full_name, lambda op=op: probes(op)) for op in ops]


def module_probes() -> list[tuple[str, Callable[[], Iterator[Probe]]]]:
    from tests.pytorch_databases import module_db

    def probes(info: Any) -> Iterator[Probe]:
        for training in (True, False) if info.train_and_eval_differ else (True,):
            samples = info.module_inputs_func(
                info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
            )
            for sample in _spread(samples, SAMPLES):
                constructor, forward = sample.constructor_input, sample.forward_input
                module = info.module_cls(*constructor.args, **constructor.kwargs)
                module.train(training)
                arguments = tree_map(_with_grad, (tuple(forward.args), dict(forward.kwargs)))
                name = info.name if training else f"{info.name} eval"
                yield Probe(name, module, arguments, module)

    return [(info.name, lambda info=info: probes(info)) for info in module_db]


def _outcome(probe: Probe) -> tuple[str, str]:
    try:
        run_probe(probe)
    except Skipped as skipped:
        return "skipped", str(skipped)
    except Wrong as wrong:
        return "wrong", str(wrong)
    except InternalError as error:
        return "wrong", f"InternalError: {error}"
    except NotImplementedError as error:
        return "unclear", f"{type(error).__name__}: {error}"
    except poptorch.Error as error:
        at_run_time = "while running" in str(error)
        return "unclear" if at_run_time else "unsupported", str(error)
    except Exception as error:
        return "unclear", f"{type(error).__name__}: {error}"
    return "passed", ""


def main(kind: str, first: int, only: str = "") -> None:
    """Work through the groups of a kind, from number ``first`` on.

    Args:
        kind: ``ops``; ``complex``, for operators of complex numbers; or ``modules``.
        first: Number of the first group.
        only: A part of the names of the groups.
    """
    warnings.simplefilter("ignore")
    logging.getLogger("poptorch::python").setLevel(logging.ERROR)
    dtypes = {"ops": torch.float32, "complex": torch.complex64}
    groups = operator_probes(dtypes[kind]) if kind in dtypes else module_probes()
    for number, (group, probes) in enumerate(groups):
        if number < first or only not in group:
            continue
        print(json.dumps({"group": number, "name": group}), flush=True)
        torch.manual_seed(number)
        try:
            for i, probe in enumerate(probes()):
                outcome, detail = _outcome(probe)
                line = {"case": f"{probe.name} [{i}]", "outcome": outcome, "detail": detail[:500]}
                print(json.dumps(line), flush=True)
        except Exception as error:
            detail = f"samples: {type(error).__name__}: {error}"
            line = {"case": group, "outcome": "skipped", "detail": detail[:500]}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
