"""Finds the module of a collective that its own origin does not name: that of the product that takes its result.

XLA gives a gather of a slice of stacked parameters the origin of the slice, which is the scan over all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoshard.sharding.audit.constants import CONSUMER_SEARCH_STEPS
from autoshard.sharding.hlo.collectives import Collective
from autoshard.sharding.hlo.parser import FORWARDING, Computation, Instruction, Program
from autoshard.sharding.overlap.module_times import gather_scope, has_scope

_PASSED = (
    *FORWARDING,
    "async-done",
    "call-done",
    "copy-start",
    "copy-done",
    "slice-start",
    "slice-done",
    "custom-call",
)


def origin_of(
    program: Program, place: tuple[str, str], collective: Collective, axes: Sequence[str], stored: Sequence[str]
) -> str:
    """Return the origin of a collective, with the scope of a module if one is found.

    Args:
        program: the compiled program.
        place: the computation and the instruction that runs or starts it.
        collective: the collective.
        axes: the mesh axes of its groups.
        stored: the mesh axes over which the plan stores parameters. Other gathers are those of activations.
    """
    is_gather = collective.kind == "all-gather" and axes and {*axes} <= {*stored}
    if has_scope(collective.op_name) or not is_gather:
        return collective.op_name
    computation = program.computations[place[0]]
    for name in _consumers(program, computation, computation.by_name[place[1]]):
        if scope := gather_scope(name):
            return scope
    return collective.op_name


def _consumers(program: Program, computation: Computation, start: Instruction) -> Iterator[str]:
    """The origins of the instructions that take the result of an instruction, up to copies and the like."""
    pending, seen = [start], {start.name}
    for _ in range(CONSUMER_SEARCH_STEPS):
        if not pending:
            return
        for user in computation.users.get(pending.pop(0).name, ()):
            if user.name in seen:
                continue
            seen.add(user.name)
            if user.opcode in _PASSED or user.opcode.endswith("-done"):
                pending.append(user)
                continue
            yield user.op_name
            yield from (inner.op_name for _, inner in program.inside(user))
