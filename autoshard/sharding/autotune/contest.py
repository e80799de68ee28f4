"""How the fastest of several plans is chosen: by estimate, by the compiler, or by running them."""

from __future__ import annotations

from autoshard.sharding.autotune.compiled_time import fastest_compiled
from autoshard.sharding.autotune.measured_time import fastest_measured
from autoshard.sharding.planner.shortlist import Shortlist

OVER = (1.25, 1.5)
"""How many times the memory that there is a plan may take by the estimate to be compiled all the same, one up to each
of these, if it is faster than all that take less: XLA computes again what does not fit, by a policy of its own."""


def contest(verify: int, measure: int) -> Shortlist | None:
    """What `verify=` and `measure=` ask for, None for nothing."""
    if measure:
        return Shortlist(measure, fastest_measured)
    if not verify:
        return None
    return Shortlist(verify, fastest_compiled, OVER if verify > 1 else ())  # one is looked at, as it is
