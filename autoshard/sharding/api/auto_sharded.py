"""`AutoSharded`: a planned function with access to its plans."""

from __future__ import annotations

from typing import Any

from autoshard._tracebacks import hides_own_frames
from autoshard.sharding.api.plan import Plan
from autoshard.sharding.runtime.planned_function import PlannedFunction
from autoshard.sharding.runtime.planned_signature import PlannedSignature


class AutoSharded(PlannedFunction):
    """The result of `auto_shard(function)`."""

    @hides_own_frames
    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """Return the plan for these arguments (arrays or shapes). Later calls use it."""
        return self.plan_of(self.entry(args, kwargs))

    def plan_of(self, entry: PlannedSignature) -> Plan:
        """Return the plan of one signature, always the same object."""
        plans: dict[PlannedSignature, Plan] = self.__dict__.setdefault("_plans", {})
        if entry not in plans:
            plans[entry] = Plan.of(entry.bound)
        return plans[entry]
