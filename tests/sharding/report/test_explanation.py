"""`plan.explain(path)`: the reasons for a sharding, and the traffic that it causes."""

import re

import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import AutoshardWarning, PlanError
from autoshard.sharding.plan.tensors import Leaf
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.sharding.report.input_traffic import traffic_of
from tests.sharding.example_step import shapes, train_step
from tests.sharding.report.plans import half_built, planned, unbound


def test_explain_gives_the_logical_axis_and_the_storage():
    text = planned().explain("0/params/attention/wq")
    assert "parameter, float32[32, 8, 4], 4.00 KiB; 512 B per device" in text
    assert "-> P('fsdp', 'tp')" in text
    flat = re.sub(r"\s+", " ", text)
    assert "fsdp: shards dimension 0 (embed) 2 ways in storage only (ZeRO)" in flat
    assert re.search(
        r"tp: shards dimension 1 \(heads\) 4 ways: the first of \([^)]*heads[^)]*\) that this tensor has", flat
    )
    assert "stored over fsdp: cast to the compute dtype and gathered to P(None, 'tp') for each use" in flat


def test_explain_names_the_logical_axes_that_come_later():
    table = {"a": ["batch"], "b": ["heads", "embed"]}
    plan = autoshard.plan(train_step, *shapes(), mesh={"a": 2, "b": 4}, plan=table)
    flat = re.sub(r"\s+", " ", plan.explain("params/attention/wq"))
    assert (
        "b: shards dimension 1 (heads) 4 ways: the first of (heads, embed) that this tensor has; embed comes later"
        in flat
    )
    assert "a: not used: it shards batch, which this tensor lacks" in flat
    assert "none of which this tensor has" in plan.explain("loss")


def test_explain_names_the_size_that_does_not_divide():
    state, batch = shapes(batch=12, seq=16)
    both = autoshard.plan(train_step, state, batch, mesh={"a": 8}, plan={"a": ["batch", "seq"]})
    text = both.explain("1/x")
    assert "a: shards dimension 1 (seq) 8 ways: of (batch, seq), batch has size 12, not divisible by 8" in text
    with pytest.warns(AutoshardWarning, match="nothing is sharded"):
        one = autoshard.plan(train_step, state, batch, mesh={"a": 8}, plan={"a": ["batch"]})
    assert "a: not used: batch has size 12, not divisible by 8" in one.explain("1/x")
    assert "batch 12 is not divisible by a 8). Pad batch to 16" in re.sub(r"\s+", " ", str(one))


def test_explain_names_fixed_shardings():
    plan = autoshard.plan(
        train_step, *shapes(), mesh={"a": 8}, plan={"a": ["batch"]}, fixed={"0/*/mlp/up": P("a")}, target="cpu:8"
    )
    flat = re.sub(r"\s+", " ", plan.explain("params/mlp/up"))
    assert "a: shards dimension 0 (embed) 8 ways: fixed by the user, or as the array was already sharded" in flat


def test_explain_accepts_ends_of_paths_and_globs():
    plan = planned()
    assert plan.explain("params/attention/wq").startswith("state/params/attention/wq\n")
    with pytest.raises(PlanError, match="'wq' is the end of 2 paths: state/moments/.*wq, state/params/.*wq. Give"):
        plan.explain("wq")
    assert plan.explain("/moments/attention/wq").startswith("state/moments/attention/wq\n")
    assert plan.explain("0/params/attention/wq") == plan.explain("state/params/attention/wq")
    assert plan.explain("state/*/attention/wq") == plan.explain("0/*/attention/wq")
    text = plan.explain("*/mlp/*")
    assert all(f"{tree}/mlp/{name}" in text for tree in ("params", "moments") for name in ("up", "down"))
    assert plan.explain("*/attention/w[kq]").count("the same for 1 more: ") == 2  # parameters, moments
    assert plan.explain("1/loss").startswith("1/loss\n  result, float32[]")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("attention/wz", r"no input or result is called 'attention/wz'. Similar paths: .*attention/w"),
        ("mlp/upp", "Similar paths: state/params/mlp/up|Similar paths: state/moments/mlp/up"),
        ("*nothing*", r"no input or result.*There are state/count"),
        ("", "no input or result is called ''"),
    ],
)
def test_explain_suggests_similar_paths(path, message):
    with pytest.raises(PlanError, match=message):
        planned().explain(path)


def test_explain_rejects_an_ambiguous_end_of_a_path():
    leaves = tuple(Leaf(f"{k}/scale", (4,), "float32", P(), ("embed",), "parameter") for k in "abc")
    with pytest.raises(PlanError, match="'scale' is the end of 3 paths: a/scale, b/scale, c/scale. Give a longer path"):
        half_built(inputs=leaves).explain("scale")


def test_explain_shows_traffic_if_the_function_is_known():
    assert "all-gather of the tensor over fsdp" in planned().explain("params/mlp/up")
    assert "bind the plan to its function" in unbound().explain("params/mlp/up")
    assert "all-gather of the tensor over dp" not in planned("dp:8").explain("params/mlp/up")
    assert re.search(r"(all-reduce|reduce-scatter) of its gradient over dp", planned("dp:8").explain("params/mlp/up"))
    zero1 = planned("zero1:8").explain("params/mlp/up")
    assert re.search(r"all-gather of the tensor over zero1, 14\.0 KiB, after the update", zero1)


@pytest.mark.parametrize("words", ["dp:8", "zero1:8", "fsdp:8"])
def test_traffic_of_parameters_sums_to_the_traffic_of_the_plan(words):
    """Under data parallelism, nearly all traffic is of parameters and gradients, each counted once."""
    plan = planned(words)
    of_parameters = sum(
        sum(traffic_of(bound_or_error(plan.bound), i).values())
        for i, x in enumerate(plan.inputs)
        if x.role == "parameter"
    )
    assert 0.97 * plan.estimate.comm_bytes <= of_parameters <= plan.estimate.comm_bytes * 1.0001
