"""The compiler options of a plan, in words: its option sets, and those that are off."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.sharding.machines.options import off_by_numerics, reported_numerics, sets_in
from autoshard.sharding.machines.targets import TargetError, find_target
from autoshard.sharding.plan.program_facts import program_facts
from autoshard.sharding.plan.sharding_plan import ShardingPlan


def option_texts(plan: ShardingPlan) -> Sequence[str]:
    """The requested options, option sets, other options, and sets that are off because of wrong numbers.

    Requested options are unchecked as long as nothing was compiled.
    """
    own = [f"{name}={value}" for name, value in plan.requested_options.items()]
    texts = [f"requested compiler options: {', '.join(own)}"] if own else []
    if own and not plan.audits and not plan.measured:
        texts.append(
            "unchecked: nothing is compiled yet; plan.verify() or --verify 1 reports what the compiler refuses"
        )
    facts = program_facts(plan)
    if facts is None:
        return texts
    try:
        options = plan.compiler_options.get(find_target(plan.target).platform, {})
    except TargetError:
        return texts
    names, rest = sets_in(facts.chip, options)
    if listed := [*names, *(f"{name}={options[name]}" for name in rest)]:
        texts.append(f"compiler options: {', '.join(listed)}")
    if wrong := reported_numerics(facts.chip, options):
        texts.append(f"compiler options that may change numbers: {_reports(wrong)}")
    if off := off_by_numerics(facts.chip, options):
        texts.append(f"off, because they may change numbers: {_reports(off)}")
    return texts


def _reports(sets: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{name} ({report})" for name, report in sets)
