"""Plans the shardings of a JAX program that is written for one device, and runs it on many.

Public names are imported on first use, so that the command line can configure devices before JAX starts. `__init__.pyi`
declares them for type checkers.
"""

from __future__ import annotations

import importlib
from typing import Any

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


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'autoshard' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"autoshard.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
