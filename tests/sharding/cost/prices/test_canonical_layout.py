"""Specs in which numbers stand for mesh axes."""

import gc
import math
import weakref

import pytest

from autoshard.sharding.cost.prices.canonical_layout import CanonicalLayout
from autoshard.sharding.planner.strategy_prices import StrategyPrices
from autoshard.sharding.program.operator_kinds import is_declared
from tests.sharding.cost.test_equivalence_classes import problem
from tests.sharding.search.test_sequence_ways import forward, inputs


def canonical(words):
    chosen = problem()._requested_layout(words)
    return CanonicalLayout(chosen, problem().cost.queries), chosen


def test_names_of_mesh_axes_do_not_matter():
    (one, _first), (other, _second) = canonical("dp:8"), canonical("zero1:8")
    number = next(n for n, each in enumerate(problem().cost.classes) if each.op.name == "dot_general")
    assert one(number).number == other(number).number
    assert (one(number).names, other(number).names) == ({"0": ("dp",)}, {"0": ("zero1",)})


def test_sizes_of_mesh_axes_matter():
    (one, _first), (other, _second) = canonical("dp:4 tp:2"), canonical("dp:2 tp:4")
    numbers = [(one(n).number, other(n).number) for n in range(len(problem().cost.classes))]
    assert any(a != b for a, b in numbers)


def test_sizes_are_those_of_the_layouts_own_mesh():
    for found, _chosen in [canonical("dp:4 fsdp:2"), canonical("dp:2 fsdp:4")]:
        assert [*found.mesh] == ["dp", "fsdp"]
        for n in range(len(problem().cost.classes)):
            specs = found(n)
            sizes = {number: math.prod(found.mesh[a] for a in axes) for number, axes in specs.names.items()}
            assert specs.sizes == sizes


def test_forms_are_shared_by_layouts_of_one_mesh():
    (one, _first), (other, _second) = canonical("dp:4 tp:2"), canonical("dp:4 tp:2 state")
    assert any(one(n) is other(n) for n in range(len(problem().cost.classes)))


def test_specs_are_derived_when_they_are_needed():
    found, chosen = canonical("dp:4 tp:2 seq")
    before = len(chosen.known_specs)
    found(0)
    after_one = len(chosen.known_specs)
    for number in range(len(problem().cost.classes)):
        found(number)
    assert before < after_one < len(chosen.known_specs)


@pytest.mark.slow
def test_the_layout_is_not_kept():
    found, chosen = canonical("fsdp:8")
    alive = weakref.ref(chosen)
    del chosen
    gc.collect()
    assert alive() is None and found.mesh == {"fsdp": 8}


def test_ways_of_attention_matter_to_operators_that_have_ways():
    """Other operators, such as products of weights, have the same prices whichever way attention runs."""
    found = StrategyPrices(forward, inputs(), target="v5p:2x2x2").problem
    queries, classes = found.cost.queries, found.cost.classes
    layouts = [found._requested_layout(words) for words in ("ring:8", "gather:8")]
    ring, other = (CanonicalLayout(layout, queries) for layout in layouts)
    same = {is_declared(each.op): ring(n).number == other(n).number for n, each in enumerate(classes)}
    assert same == {False: True, True: False}
    assert all(ring(n).sequence == {} for n, each in enumerate(classes) if not is_declared(each.op))
