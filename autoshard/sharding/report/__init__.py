"""Plans for people: a table, why a tensor is sharded as it is, what differs, a page."""

from autoshard.sharding.report.diff import diff
from autoshard.sharding.report.explain import explain
from autoshard.sharding.report.page import to_html
from autoshard.sharding.report.table import table

__all__ = ["diff", "explain", "table", "to_html"]
