"""Plans for people: a table, why a tensor is sharded as it is, what differs, a page."""

from autoshard.sharding.report.compare import diff
from autoshard.sharding.report.overview import table
from autoshard.sharding.report.page import to_html
from autoshard.sharding.report.reasons import explain

__all__ = ["diff", "explain", "table", "to_html"]
