"""No report fails, for any plan."""

import copy
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from autoshard.sharding.machines.device_mesh import abstract_mesh
from autoshard.sharding.plan.search_record import PricedPlan, SearchRecord
from autoshard.sharding.plan.sharding_plan import Estimate
from autoshard.sharding.plan.tensors import Activation, Leaf
from autoshard.sharding.report.page import page
from tests.sharding.report.html_reader import read
from tests.sharding.report.plans import REQUESTS, half_built, planned, unbound


def all_of(plan):
    texts = [repr(plan), str(plan), format(plan), f"{plan}", page(plan), plan.diff(plan), plan.diff(half_built())]
    texts += [half_built().diff(plan), plan.to_json()]
    texts += [plan.explain(leaf.path) for leaf in (*plan.inputs, *plan.outputs) if leaf.path.strip("/")]
    assert all(isinstance(text, str) and text for text in texts)
    for copied in (copy.copy(plan), copy.deepcopy(plan)):
        assert str(copied) == str(plan)


@pytest.mark.few(3)
@pytest.mark.parametrize("words", REQUESTS)
@pytest.mark.parametrize("make", [planned, unbound])
def test_all_reports_of_real_plans(words, make):
    all_of(make(words))


NAMES = st.sampled_from(["batch", "embed", "heads*groups", "0/params/wq:1", "1", "", "*", "a/b/", "é"])


AXES = st.sampled_from(["dp", "tp", "pp"])


BYTES = st.one_of(st.floats(0, 1e20), st.just(math.inf), st.just(math.nan))


ENTRIES = st.one_of(st.none(), AXES, st.lists(AXES, min_size=1, max_size=2, unique=True).map(tuple))


def each_axis_once(spec):
    axes = [axis for entry in spec if entry for axis in ([entry] if isinstance(entry, str) else entry)]
    return len(axes) == len(set(axes))


@st.composite
def leaves(draw):
    spec = draw(st.lists(ENTRIES, max_size=3).filter(each_axis_once))
    return Leaf(
        draw(st.sampled_from(["x", "0/a/w", "1/b/w", "0/3", "//", ""])),
        tuple(draw(st.lists(st.integers(0, 9), max_size=4))),
        draw(st.sampled_from(["float32", "bfloat16", "key<fry>", "int4", "float0", "no such type"])),
        P(*spec),
        tuple(draw(st.lists(NAMES, max_size=4))),
        draw(st.sampled_from(["parameter", "optimizer", "data", "other", ""])),
    )


@st.composite
def estimates(draw):
    kinds = st.dictionaries(st.sampled_from(["parameter", "temporary", "other", "new"]), BYTES)
    step, compute, comm, moved, peak = (draw(BYTES) for _ in range(5))
    return Estimate(step, compute, comm, moved, peak, draw(kinds))


@st.composite
def histories(draw):
    tried = st.builds(PricedPlan, st.sampled_from(["dp:8", "tp:8"]), BYTES, BYTES, BYTES, st.just("all-gather"), BYTES)
    candidate_lists = st.lists(tried, max_size=3).map(tuple)
    return tuple(
        SearchRecord({"remat": "none"}, 5, 1, 1, 1, candidates)
        for candidates in draw(st.lists(candidate_lists, max_size=2))
    )


@st.composite
def random_plans(draw):
    axes = draw(st.dictionaries(AXES, st.integers(1, 40)))
    return half_built(
        mesh=abstract_mesh(axes),
        axis_rules=draw(st.dictionaries(AXES, st.lists(NAMES, max_size=3).map(tuple))),
        storage=draw(
            st.dictionaries(st.sampled_from(["parameter", "optimizer"]), st.lists(AXES, max_size=2).map(tuple))
        ),
        inputs=tuple({x.path: x for x in draw(st.lists(leaves(), max_size=3))}.values()),
        outputs=tuple({x.path: x for x in draw(st.lists(leaves(), max_size=2))}.values()),
        estimate=draw(estimates()),
        alone=draw(st.one_of(st.none(), estimates())),
        links=draw(st.dictionaries(AXES, st.tuples(st.sampled_from(["ring", "new"]), BYTES), max_size=2)),
        topology=tuple(draw(st.lists(st.tuples(AXES, st.integers(1, 4)), max_size=3))),
        activations=tuple(Activation(**vars(x), held_bytes=draw(BYTES)) for x in draw(st.lists(leaves(), max_size=2))),
        history=draw(histories()),
        variant=draw(st.sampled_from([{}, {"remat": "none"}])),
        traffic=tuple(draw(st.lists(st.tuples(st.just("all-reduce"), AXES, BYTES, st.text(max_size=9)), max_size=3))),
        unknown=draw(
            st.dictionaries(st.text(max_size=5), st.lists(st.text(max_size=5), max_size=2).map(tuple), max_size=2)
        ),
        chosen=draw(st.sampled_from(["", "dp:8"])),
        candidates=tuple(draw(st.lists(st.tuples(st.sampled_from(["dp:8", "tp:8"]), BYTES, BYTES), max_size=3))),
        axis_sizes=draw(st.dictionaries(NAMES, st.integers(0, 9), max_size=3)),
        limit_bytes=draw(st.one_of(st.just(0.0), BYTES)),
    )


@settings(max_examples=10)
@given(random_plans())
def test_all_reports_of_random_plans(plan):
    all_of(plan)
    read(page(plan))


@pytest.mark.slow
@given(random_plans())
def test_all_reports_of_more_random_plans(plan):
    all_of(plan)
    read(page(plan))
