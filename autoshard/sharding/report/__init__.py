"""Reports of plans: a table, explanations of single tensors, differences between plans, an HTML page."""

from autoshard.sharding.report.explanation import explain
from autoshard.sharding.report.gradient_reductions import reduce_axes
from autoshard.sharding.report.kinds import BestOfKind, best_of_kinds
from autoshard.sharding.report.page import to_html
from autoshard.sharding.report.plan_diff import diff
from autoshard.sharding.report.plan_table import table

__all__ = ["BestOfKind", "best_of_kinds", "diff", "explain", "reduce_axes", "table", "to_html"]
