"""The rule for each operator: one table, merged from the tables of the files in this folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.fx

from popsim_torch.errors import InternalError
from popsim_torch.lowering.rules import (
    creation,
    custom,
    dense,
    elementwise,
    enqueues,
    host,
    joins,
    losses,
    norms,
    pooling,
    recurrent,
    reductions,
    resampling,
    rows,
    scatters,
    searches,
    views,
)
from popsim_torch.lowering.rules.aten import lower_aten
from popsim_torch.lowering.rules.rule import Family, Rule

_LONG_TAIL = Rule(lower_aten)


class RuleTable:
    """One rule for each operator.

    Args:
        tables: Rules by operator.
        families: Rules of operators that have a property.

    Raises:
        InternalError: Two tables, or a table and a family, claim the same operator.
    """

    def __init__(
        self, tables: Iterable[Mapping[Any, Rule]], families: Iterable[Family] = ()
    ) -> None:
        self._families = tuple(families)
        self.rules: dict[Any, Rule] = {}
        for table in tables:
            for target, rule in table.items():
                if target in self.rules or any(f.claims(target) for f in self._families):
                    raise InternalError(f"lowering: two rules claim the operator {target}")
                self.rules[target] = rule

    def rule_of(self, node: torch.fx.Node) -> Rule:
        """Return the rule for a node of an ATen or custom operator.

        Raises:
            InternalError: Two families claim its operator.
        """
        rule = self.rules.get(node.target) or self._rule_of_family(node.target)
        return rule if rule is not None and rule.supports(node) else _LONG_TAIL

    def _rule_of_family(self, target: Any) -> Rule | None:
        rules = [family.rule for family in self._families if family.claims(target)]
        if len(rules) > 1:
            raise InternalError(f"lowering: two rules claim the operator {target}")
        return rules[0] if rules else None


RULES = RuleTable(
    (
        creation.RULES,
        custom.RULES,
        dense.RULES,
        elementwise.RULES,
        host.RULES,
        enqueues.RULES,
        joins.RULES,
        losses.RULES,
        norms.RULES,
        pooling.RULES,
        recurrent.RULES,
        reductions.RULES,
        resampling.RULES,
        rows.RULES,
        scatters.RULES,
        searches.RULES,
    ),
    (creation.RANDOM, views.VIEWS),
)
