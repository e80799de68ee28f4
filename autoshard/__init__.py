"""Plans the shardings of a JAX program that is written for one device, and runs it on many.

Public names are imported on first use, so that the command line can configure devices before JAX starts. `__init__.pyi`
declares them for type checkers.
"""

from __future__ import annotations

from autoshard._first_use import on_first_use

__version__ = "0.1.0"

_MODULES = {
    "AutoshardError": "errors",
    "AutoshardWarning": "errors",
    "auto_shard": "sharding.api.entry_points",
    "check_rule": "sharding.oracle.rule_check",
    "Discovery": "sharding.discover.rule_discovery",
    "discover": "sharding.discover.rule_discovery",
    "Plan": "sharding.api.plan",
    "plan": "sharding.api.entry_points",
    "replace_kernels": "sharding.rewrite.before_gradient",
    "KernelCost": "spmdrules.custom_ops.kernel_cost",
    "operator": "spmdrules.custom_ops.operator",
    "Propagation": "spmdrules.propagation.propagate",
    "propagate": "spmdrules.propagation.propagate",
    "rule": "spmdrules.core.registry",
    "Factor": "spmdrules.core.rule",
    "Rule": "spmdrules.core.rule",
}

__all__ = ["__version__", *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__, __dir__ = on_first_use(__name__, _MODULES)
