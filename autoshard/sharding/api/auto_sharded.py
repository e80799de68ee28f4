"""What `auto_shard(function)` returns: a planned function that shows its plan."""

from __future__ import annotations

from typing import Any

from autoshard.sharding.api.plan import Plan
from autoshard.sharding.runtime.dispatch import Entry
from autoshard.sharding.runtime.planned_function import PlannedFunction


class AutoSharded(PlannedFunction):
    """What `auto_shard(function)` returns."""

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays or shapes); kept for the calls that follow."""
        return self.plan_of(self.entry(args, kwargs))

    def plan_of(self, entry: Entry) -> Plan:
        """The plan of one signature, always the same object."""
        plans: dict[Entry, Plan] = self.__dict__.setdefault("_plans", {})
        if entry not in plans:
            plans[entry] = Plan.of(entry.bound)
        return plans[entry]
