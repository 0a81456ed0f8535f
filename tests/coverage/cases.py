"""The cases: every operator and module of PyTorch's own databases, with its samples."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.coverage.call import Call, itself
from tests.coverage.outcome import Outcome
from tests.coverage.trial import try_forward, try_gradient
from tests.pytorch_databases import invocations, module_db, op_db

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "bool": torch.bool,
    "complex64": torch.complex64,
}
KINDS = ("forward", "in place", "gradient")
WITH_GRADIENT = ("float32", "complex64")


def _unseeded(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


# Random operators would draw the same numbers in every call.
invocations.wrapper_set_seed = _unseeded


@dataclass(frozen=True)
class Case:
    """An operator or module in one dtype.

    Attributes:
        group: "ops" or "modules".
        name: The name in the database.
        dtype: The name of the dtype.
        kind: One of ``KINDS``: what is compared.
    """

    group: str
    name: str
    dtype: str
    kind: str


def _op_name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


OPS = {_op_name(op): op for op in op_db}
MODULES = {info.name: info for info in module_db}


def all_cases() -> Iterator[Case]:
    """Yield all cases."""
    for name, op in OPS.items():
        for dtype, held in DTYPES.items():
            if held not in op.dtypes:
                continue
            yield Case("ops", name, dtype, "forward")
            if dtype == "float32" and op.inplace_variant is not None:
                yield Case("ops", name, dtype, "in place")
            if dtype in WITH_GRADIENT and op.supports_autograd and held in op.backward_dtypes:
                yield Case("ops", name, dtype, "gradient")
    for name in MODULES:
        yield Case("modules", name, "float32", "forward")
        yield Case("modules", name, "float32", "gradient")


def _in_place(op: Callable[..., Any]) -> Callable[..., Any]:
    def call(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        changed = first.clone()
        op(changed, *args, **kwargs)
        return changed

    return call


def _op_calls(case: Case) -> Iterator[Call]:
    op, dtype = OPS[case.name], DTYPES[case.dtype]
    unwritten = "empty" in case.name
    for sample in op.sample_inputs("cpu", dtype, requires_grad=case.kind == "gradient"):
        structure = ((sample.input, *sample.args), dict(sample.kwargs))
        if case.kind != "in place":
            yield Call(op.op, structure, sample.output_process_fn_grad, unwritten=unwritten)
        elif not sample.broadcasts_input and isinstance(sample.input, torch.Tensor):
            yield Call(_in_place(op.inplace_variant), structure, itself, unwritten=unwritten)


def _module_calls(case: Case) -> Iterator[Call]:
    info, dtype = MODULES[case.name], DTYPES[case.dtype]
    for training in (True, False):
        inputs = info.module_inputs_func(
            info,
            device="cpu",
            dtype=dtype,
            requires_grad=case.kind == "gradient",
            training=training,
        )
        for one in inputs:
            made, given = one.constructor_input, one.forward_input
            if given is None:
                continue
            module = info.module_cls(*made.args, **made.kwargs).to(dtype).train(training)
            yield Call(module, (tuple(given.args), dict(given.kwargs)), module=module)


def chosen_calls(case: Case, most: int | None) -> list[tuple[int, Call]]:
    """Return numbered calls of a case: at most so many, seeded; None for all.

    Of dtypes without gradients it is at most one, with values if there is one that has them.
    """
    torch.manual_seed(0)
    random.seed(0)
    made = _op_calls(case) if case.group == "ops" else _module_calls(case)
    found = list(enumerate(made))
    if most is not None and case.dtype not in WITH_GRADIENT:
        most = 1
        found = [pair for pair in found if not pair[1].is_empty] or found
    if most is None or len(found) <= most:
        return found
    picks = random.Random(f"{case.name} {case.dtype}").sample(range(len(found)), most)
    return [found[i] for i in sorted(picks)]


def run_call(case: Case, call: Call) -> Outcome:
    """Run a call of a case and compare."""
    torch.manual_seed(0)
    return try_gradient(call) if case.kind == "gradient" else try_forward(call)
