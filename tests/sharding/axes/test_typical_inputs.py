"""Inputs of which equal ones are left out."""

from autoshard.sharding.axes.typical_inputs import typical_inputs
from tests.sharding.cost.test_equivalence_classes import problem


def test_the_first_and_the_last_of_equal_inputs_are_kept():
    problems = problem(layers=6)
    axes, roles = problems.axes, problems.roles
    kinds = {}
    for v, role in roles.inputs.items():
        kinds.setdefault((axes.of_value[v], axes.program.avals[v].shape, role), []).append(v)
    expected = sorted({v for alike in kinds.values() for v in (alike[0], alike[-1])})
    assert sorted(typical_inputs(axes, roles)) == expected
    assert len(expected) < len(roles.inputs)
