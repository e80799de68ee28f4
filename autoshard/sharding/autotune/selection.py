"""How the fastest of several plans is chosen: by the estimate, by the compiler, or by running them."""

from __future__ import annotations

from autoshard.sharding.autotune.compiled_time import fastest_compiled
from autoshard.sharding.autotune.constants import OVER_LIMIT
from autoshard.sharding.autotune.measured_time import fastest_measured
from autoshard.sharding.planner.shortlist import Shortlist


def requested_shortlist(verify: int, measure: int) -> Shortlist | None:
    """Return how the options `verify=` and `measure=` compare plans; None if both are 0."""
    if measure:
        return Shortlist(measure, fastest_measured)
    if not verify:
        return None
    return Shortlist(verify, fastest_compiled, OVER_LIMIT if verify > 1 else ())
