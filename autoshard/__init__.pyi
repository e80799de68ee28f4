from autoshard.errors import AutoshardError
from autoshard.errors import AutoshardWarning
from autoshard.sharding.api.entry_points import auto_shard
from autoshard.sharding.api.entry_points import plan
from autoshard.sharding.api.plan import Plan
from autoshard.sharding.discover.rule_discovery import Discovery
from autoshard.sharding.discover.rule_discovery import discover
from autoshard.sharding.oracle.rule_check import check_rule
from autoshard.sharding.rewrite.before_gradient import replace_kernels
from autoshard.spmdrules.core.registry import rule
from autoshard.spmdrules.core.rule import Factor
from autoshard.spmdrules.core.rule import Rule
from autoshard.spmdrules.custom_ops.kernel_cost import KernelCost
from autoshard.spmdrules.custom_ops.operator import operator
from autoshard.spmdrules.propagation.propagate import Propagation
from autoshard.spmdrules.propagation.propagate import propagate

__version__: str
__all__ = [
    "__version__",
    "AutoshardError",
    "AutoshardWarning",
    "auto_shard",
    "plan",
    "Plan",
    "replace_kernels",
    "Discovery",
    "discover",
    "check_rule",
    "rule",
    "Factor",
    "Rule",
    "KernelCost",
    "operator",
    "Propagation",
    "propagate",
]
