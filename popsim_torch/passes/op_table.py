"""The op table of the device's library."""

from __future__ import annotations

import functools
from typing import Any

import torch

from popsim_torch import _native
from popsim_torch.ir import AttributeRule, Operand, OpInfo, OpTable


@functools.cache
def op_table() -> OpTable:
    """Return the entry of every kind of op, by its name."""
    return {entry.name: _info(entry) for entry in _native.op_table()}


def _info(entry: _native.OpDef) -> OpInfo:
    schema = entry.schema
    return OpInfo(
        entry.name,
        schema.repeats,
        tuple(map(_operand, schema.inputs)),
        {rule.name: _rule(rule) for rule in schema.attributes},
        tuple(map(_operand, schema.outputs)),
        entry.family,
        entry.reuses_input,
        entry.cheap,
        entry.layer,
        entry.exact,
        entry.calls_host,
    )


def _operand(operand: _native.Operand) -> Operand:
    count: Any = operand.count
    return Operand(
        operand.name,
        count,
        operand.has_gaps,
        operand.counter,
        frozenset(getattr(torch, name) for name in operand.dtypes),
        operand.memory,
        operand.written,
    )


def _rule(rule: _native.AttributeRule) -> AttributeRule:
    return AttributeRule(
        rule.name,
        rule.type,
        rule.is_list,
        rule.length,
        rule.required,
        frozenset(rule.choices),
        rule.least,
        rule.most,
    )
