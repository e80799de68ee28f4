"""Derives the options that a program is compiled under from `Plan.verify(options=...)`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard._shown import shown
from autoshard.sharding.audit.audit import AuditError
from autoshard.sharding.machines.options import (
    Options,
    UnknownSetError,
    conflicts,
    named_set,
    reported_numerics,
    with_needed,
    with_set,
)
from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.plan.program_facts import program_facts
from autoshard.sharding.plan.sharding_plan import ShardingPlan


@shown
@dataclass(frozen=True)
class RequestedOptions:
    """The options to compile under.

    Attributes:
        options: all of them.
        own: the options to compare with: the plan's own, with those that they need. There is one exception: without
            `options=`, a plan with requested options is compared with the defaults of its chip.
        added: options that others need and that were not given, each with its reason.
        notes: conflicts, and options for which wrong numbers were reported.
    """

    options: Options
    own: Options
    added: Sequence[str] = ()
    notes: Sequence[str] = ()

    @property
    def changed(self) -> set[str]:
        """The names of options whose values differ from the plan's own."""
        names = {*self.options, *self.own}
        return {name for name in names if str(self.options.get(name)) != str(self.own.get(name))}


def requested_options(plan: ShardingPlan, request: Options | str | None) -> RequestedOptions:
    """Return the options that a request means for a plan.

    Args:
        plan: the plan.
        request: compiler options, the name of an option set, which is added to the plan's options, or None for these.

    Raises:
        AuditError: there is no such set for the plan's chip.
    """
    facts = program_facts(plan)
    plans = plan_options(plan)
    compared = find_target(plan.target).chip.options if request is None and plan.requested_options else plans
    own, _ = with_needed(compared)
    if isinstance(request, str):
        chip = facts.chip if facts else plan.target.partition(":")[0]
        try:
            chosen = named_set(request, chip)
        except UnknownSetError as error:
            raise AuditError(f"verify: {error}") from error
        given = with_set(plans, chosen, facts) if facts else plans
    else:
        given = plans if request is None else request
    options, added = with_needed(given)
    notes = [f"{a} and {b} exclude each other: turn one of them off" for a, b in conflicts(options)]
    if facts:
        notes += [f"option set {name}: {report}" for name, report in reported_numerics(facts.chip, options)]
    return RequestedOptions(options, own, added, notes)


def plan_options(plan: ShardingPlan) -> Options:
    """The plan's options for the platform of its target; none if the target is unknown."""
    return plan.compiler_options.get(find_target(plan.target).platform, {})
