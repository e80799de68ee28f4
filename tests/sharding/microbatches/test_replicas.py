"""Groups of rows whose terms are summed apart: gradients are reduced over `dp` once, not in each microbatch."""

import re

import jax
import numpy as np
import pytest

from autoshard import Plan, auto_shard, plan
from autoshard.sharding.microbatches.replicas import requested_replicas
from tests.sharding.microbatches.programs import EMBED, LAYERS, make_step, state, tokens
from tests.sharding.pipeline.inner_words import step_and_arguments


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("dp:4 tp:2", 4),
        ("dp:2 fsdp:4", 1),
        ("pp:2 dp:4", 4),
        ("dp:2 zero1:4", 1),
        ("fsdp:8", 1),
        ("dp:4 tp:2 state", 1),
        ("dp:4 cp:2", 4),
        ("pp:2 dp:2 ring:2", 2),
        ("dp:4 isp:2", 1),
        ("dp:4 tp:2 tp-ffn", 1),
        (None, 1),
        ({"dp": ["batch"]}, 1),
    ],
)
def test_the_groups_of_a_requested_plan(words, count):
    assert requested_replicas(words) == count


@pytest.mark.parametrize("kind", ["masked", pytest.param("dropout", marks=pytest.mark.slow)])
@pytest.mark.parametrize("words", ["dp:2 tp:4", pytest.param("dp:4 tp:2", marks=pytest.mark.slow)])
def test_a_step_equals_one_device(words, kind):
    expected = jax.device_get(jax.jit(make_step(kind))(state(), tokens()))
    step = auto_shard(make_step(kind), plan=words, microbatches=2)
    made = jax.device_get(step(state(), tokens()))
    assert step.plan(state(), tokens()).replicas == int(words[3])
    for actual, wanted in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=1e-6)


def test_loops_reduce_no_gradient():
    made = plan(make_step(), state(), tokens(), target="cpu:4", plan="dp:4", microbatches=2)
    text = made.jit().lower(state(), tokens()).compile().as_text()
    weight = rf"f32\[(?:{LAYERS},)?(?:1,)?{EMBED},(?:{EMBED}|{2 * EMBED})\]"
    computations = re.split(r"\n(?=\S.*\{\n)", text)
    reducing = [each for each in computations if re.search(weight + r"[^\n]* all-reduce", each)]
    assert all(each.startswith("ENTRY") for each in reducing)
    assert {leaf.spec for leaf in made.inputs if leaf.role == "parameter"} == {jax.P()}


def test_the_plan_keeps_them_in_json():
    made = plan(make_step(), state(), tokens(), target="cpu:2", plan="dp:2", microbatches=2)
    read = Plan.from_json(made.to_json())
    assert read.replicas == 2
    assert read.bind(make_step(), state(), tokens()).fingerprint == made.fingerprint
    alone = plan(make_step(), state(), tokens(), target="cpu:2", plan="fsdp:2", microbatches=2)
    assert alone.replicas == 1 and '"replicas"' not in alone.to_json()


def test_rows_that_do_not_divide_into_groups():
    with pytest.warns(match="devices have work of their own"):
        made = plan(make_step(), state(), tokens(), target="cpu:4", plan="dp:4", microbatches=4)
    assert made.replicas == 1


@pytest.mark.parametrize(
    ("words", "devices", "kind", "schedule"),
    [
        ("dp:2 ep:2", 4, "capacity", None),
        ("dp:2 tp:2", 4, "attention", None),
        pytest.param("pp:2 dp:2 ep:2", 8, "capacity", "interleaved:2", marks=pytest.mark.slow),
    ],
)
def test_groups_of_single_rows_have_the_same_experts_and_heads(words, devices, kind, schedule):
    """The gradients of weights then have the dimension of the groups. It must not be taken for attention."""
    fn, weights, x = step_and_arguments(kind)
    many, single = (
        plan(fn, weights, x, target=f"cpu:{devices}", plan=words, microbatches=count, schedule=schedule)
        for count in (len(x) // 4, len(x) // 2)
    )
    assert many.replicas == single.replicas == 2
    assert [leaf.spec for leaf in many.inputs[: len(weights)]] == [leaf.spec for leaf in single.inputs[: len(weights)]]


def test_a_search_takes_them_where_they_are_faster():
    made = plan(make_step(), state(), tokens(), target="h100:2x1", microbatches=2)
    assert made.replicas in (1, 2) and (made.replicas == 2) == made.chosen.startswith("dp:2")


def test_sums_of_microbatches_have_no_groups():
    made = plan(make_step("batch norm"), state(), tokens(), target="cpu:2", plan="dp:2", microbatches=2,
                allow_numerics=True)  # fmt: skip
    assert made.replicas == 1 and made.allow_numerics
