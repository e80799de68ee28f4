"""What the sharding of an operator's operands means for its results. Pure: no devices, no cost."""

if __name__ != "autoshard.spmdrules":  # reached through the link at the repository root: there must be no second copy
    raise ImportError("'spmdrules' at the repository root is a link for people: import autoshard.spmdrules")

from autoshard.spmdrules import (  # imported for their registrations
    contraction,
    elementwise,
    indexing,
    layout,
    linalg,
    order,
    random,
    reduction,
    window,
)
from autoshard.spmdrules.registry import rule, rule_for
from autoshard.spmdrules.rule import Factor, Rule, RuleError, Shard

__all__ = ["Factor", "Rule", "RuleError", "Shard", "rule", "rule_for"]
