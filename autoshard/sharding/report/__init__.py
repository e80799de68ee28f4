"""Plans for people: a table, why a tensor is sharded as it is, what differs, a page."""

from autoshard.sharding.report.explanation import explain
from autoshard.sharding.report.page import to_html
from autoshard.sharding.report.plan_diff import diff
from autoshard.sharding.report.plan_table import table

__all__ = ["diff", "explain", "table", "to_html"]
