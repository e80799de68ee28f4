"""Plans the shardings of a JAX program that is written for one device, and runs it on many.

Public names are imported on first use, so that the command line can configure devices before JAX starts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from autoshard.errors import AutoshardError as AutoshardError
    from autoshard.errors import AutoshardWarning as AutoshardWarning
    from autoshard.sharding.api.entry_points import auto_shard as auto_shard
    from autoshard.sharding.api.entry_points import plan as plan
    from autoshard.sharding.api.plan import Plan as Plan
    from autoshard.sharding.discover.rule_discovery import Discovery as Discovery
    from autoshard.sharding.discover.rule_discovery import discover as discover
    from autoshard.sharding.oracle.rule_check import check_rule as check_rule
    from autoshard.spmdrules.core.registry import rule as rule
    from autoshard.spmdrules.core.rule import Factor as Factor
    from autoshard.spmdrules.core.rule import Rule as Rule
    from autoshard.spmdrules.custom_ops.operator import operator as operator
    from autoshard.spmdrules.propagation.propagate import Propagation as Propagation
    from autoshard.spmdrules.propagation.propagate import propagate as propagate

_MODULES = {
    "AutoshardError": "errors",
    "AutoshardWarning": "errors",
    "auto_shard": "sharding.api.entry_points",
    "check_rule": "sharding.oracle.rule_check",
    "Discovery": "sharding.discover.rule_discovery",
    "discover": "sharding.discover.rule_discovery",
    "Plan": "sharding.api.plan",
    "plan": "sharding.api.entry_points",
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
