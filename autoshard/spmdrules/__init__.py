"""Sharding rules: what the sharding of an operator's operands means for its results. No devices, no cost model."""

if __name__ != "autoshard.spmdrules":  # imported through the link at the repository root
    raise ImportError("'spmdrules' at the root is only a link: import autoshard.spmdrules instead")

import autoshard.spmdrules.families  # noqa: F401  registers every rule
from autoshard.spmdrules.core.registry import rule, rule_for
from autoshard.spmdrules.core.rule import Factor, Rule, RuleError, Shard
from autoshard.spmdrules.reference.rule_table import TableRow, table

__all__ = ["Factor", "Rule", "RuleError", "Shard", "TableRow", "rule", "rule_for", "table"]
