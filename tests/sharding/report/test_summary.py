"""What the reports of a plan share: names of axes, groups, the reason for the choice."""

from dataclasses import replace

from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from autoshard.sharding.plan.sharding_plan import Estimate, ShardingPlan
from autoshard.sharding.plan.tensors import Activation, Leaf
from autoshard.sharding.report.search_outcome import verdict
from autoshard.sharding.report.summary import AxisNames, groups, mesh_text
from tests.sharding.report.plans import half_built, planned


def test_short_axis_names_are_distinct():
    leaf = Leaf("x", (2, 2, 2, 2), "float32", P(), ("a/k:0", "b/k:0", "c/q:1", "heads*c/q:2"))
    names = AxisNames(half_built(inputs=(leaf,)))
    assert names.list(leaf.axes) == "[a/k:0, b/k:0, q:1, heads*q:2]"
    assert len({names.short(name) for name in names.all}) == len(names.all)


def test_long_axis_names_are_shortened_in_the_middle_and_stay_distinct():
    long = "MultiHeadDotProductAttention_0/relative_position_bias"
    leaf = Leaf("x", (2, 2, 2), "float32", P(), (f"{long}:0", f"{long}:1.0*{long}:1.1", "heads"))
    names = AxisNames(half_built(inputs=(leaf,)))
    assert names.list(leaf.axes) == "[relative_position_bias:0, relative_position_bias:1.0*1.1, heads]"
    leaf = Leaf(
        "x", (2, 2), "float32", P(), tuple(f"{b}/{'very_' * 8}long/kernel:{n}" for b, n in (("a", 0), ("b", 0)))
    )
    names = AxisNames(half_built(inputs=(leaf,)))
    short = "very_very_very_v..._very_long/kernel:0"
    assert names.list(leaf.axes) == f"[a/{short}, b/{short}]"
    long = tuple(f"{'very_' * 8}long_{c}_{'very_' * 8}long/kernel:0" for c in "ab")  # equal if shortened
    names = AxisNames(half_built(inputs=(Leaf("x", (2, 2), "float32", P(), long),)))
    assert names.list(long) == f"[{long[0]}, {long[1]}]"


def test_equal_head_sizes_have_one_name_if_none_is_sharded():
    leaf = Leaf("x", (4, 8, 8), "float32", P(), ("heads", "head_dim", "head_dim_1"))
    plan = half_built(inputs=(leaf,), axis_sizes={"heads": 4, "head_dim": 8, "head_dim_1": 8})
    names = AxisNames(plan)
    assert names.list(leaf.axes) == "[heads, head_dim, head_dim]"
    assert names.all_sized(names.unsharded) == ["heads 4", "head_dim 8"]
    rotated = Activation("mul", (4, 8), "float32", P(), ("heads", "head_dim_2"))
    assert AxisNames(plan.where(activations=(rotated,))).list(rotated.axes) == "[heads, head_dim]"
    others = (plan.where(axis_sizes={"head_dim": 8, "head_dim_1": 4}), plan.where(axis_rules={"tp": ("head_dim_1",)}))
    assert [AxisNames(other).short("head_dim_1") for other in others] == ["head_dim_1"] * 2


def test_a_split_mesh_axis_is_shown_as_it_was_requested():
    plan = half_built(mesh=AbstractMesh((2, 2, 2), ("dp", "tp", "tp_1")))
    assert mesh_text(plan) == "dp 2 x tp 4 = 8 devices (tp is split: tp 2 x tp_1 2)"
    assert "mesh dp:2 tp:4," in ShardingPlan.__repr__(plan)
    alone = half_built(mesh=AbstractMesh((2, 4), ("x_1", "y")))
    assert mesh_text(alone) == "x_1 2 x y 4 = 8 devices"


def test_every_input_is_in_one_group():
    plan = planned()
    assert sorted(x.path for g in groups(plan, plan.inputs) for x in g.leaves) == sorted(x.path for x in plan.inputs)
    kinds = [{(x.axes, x.spec, x.role, x.shape, x.dtype) for x in g.leaves} for g in groups(plan, plan.inputs)]
    assert all(len(kind) == 1 for kind in kinds) and len({next(iter(kind)) for kind in kinds}) == len(kinds)


def test_arrays_in_host_memory_have_their_own_group():
    plan = planned()
    moved = [replace(x, memory_kind="pinned_host") if x.role == "optimizer" and x.path.endswith("wq") else x
             for x in plan.inputs]  # fmt: skip
    made, before = groups(plan, moved), groups(plan, plan.inputs)
    assert all(len({x.memory_kind for x in g.leaves}) == 1 for g in made) and len(made) > len(before)
    lines = [line for line in str(plan.where(inputs=tuple(moved))).splitlines() if "in host memory" in line]
    assert len(lines) == 1 and "wq" in lines[0] and "wk" not in lines[0]


def test_verdict_counts_the_candidates_that_fit():
    plan = half_built(
        chosen="b", candidates=(("a", 1.0, 99.0), ("b", 2.0, 5.0), ("c", 3.0, 5.0)), limit_bytes=10.0,
        estimate=Estimate(2.0, 2.0, 0.0, 0.0, 5.0),
    )  # fmt: skip
    assert verdict(plan).sentence == "b, the fastest of 2 plans that fit 10 B (of 3)"
    assert [name for name, _, _ in verdict(plan).rivals] == ["c"]
    large = Estimate(2.0, 2.0, 0.0, 0.0, 11.0)
    none = plan.where(estimate=large, candidates=(("a", 1.0, 99.0), ("b", 2.0, 11.0)))
    assert verdict(none).sentence == "b, the smallest of 2 plans: none fits 10 B"
    assert verdict(plan.where(estimate=large)).sentence == "b, which does not fit 10 B"
    requested = plan.where(estimate=large, candidates=(), mesh=AbstractMesh((2,), ("x",)))
    assert verdict(requested).sentence == "b, as requested; it does not fit 10 B"
    assert verdict(requested.where(mesh=AbstractMesh((1,), ("x",)))).sentence == "b; it does not fit 10 B"
