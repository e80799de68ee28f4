"""Words that shard experts and sequences within the stages of a pipeline: parity on 8 devices, and what moves."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import auto_shard, plan
from autoshard.sharding.planner import planning
from autoshard.sharding.search import time_floors
from tests.sharding.pipeline.inner_words import EMBED, EXPERTS, SEQ, layer, step_and_arguments

pytestmark = pytest.mark.filterwarnings("ignore:.*devices")
MANY = pytest.mark.slow


@functools.cache
def planned_step(kind, words, schedule, dtype=jnp.float32):
    fn, *args = step_and_arguments(kind, dtype)
    return auto_shard(fn, plan=words, microbatches=4, schedule=schedule), fn, args


def largest_error(kind, words, schedule, dtype=jnp.float32):
    """Return the largest relative error of the new weights, the loss and the gradients."""
    step, fn, args = planned_step(kind, words, schedule, dtype)
    pairs = zip(jax.tree.leaves(step(*args)), jax.tree.leaves(jax.jit(fn)(*args)), strict=True)
    assert step.plan(*args).chosen == words
    return max(np.linalg.norm(np.subtract(one, other)) / np.linalg.norm(other) for one, other in pairs)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "words", "schedule"),
    [
        ("dropless", "pp:2 dp:2 ep:2", "1f1b"),
        pytest.param("capacity", "pp:2 ep:4", "gpipe", marks=MANY),
        pytest.param("dropless", "pp:2 fsdp:2 ep:2", "interleaved:2", marks=MANY),
        pytest.param("capacity", "pp:2 dp:2 ep:2", "zb", marks=MANY),
        pytest.param("dropless", "pp:2 ep:2 tp:2", "ftb", marks=MANY),
        ("attention", "pp:2 dp:2 ulysses:2", "1f1b"),
        ("attention", "pp:2 ring:4", "gpipe"),
        pytest.param("attention", "pp:2 dp:2 gather:2", "zb", marks=MANY),
        pytest.param("window", "pp:2 ring:2 ulysses:2", "interleaved:2", marks=MANY),
        pytest.param("attention", "pp:2 dp:2 isp:2", "ftb", marks=MANY),
        pytest.param("window", "pp:4 ring:2", "1f1b-inputs", marks=MANY),
    ],
)
def test_values_and_gradients_equal_one_device(kind, words, schedule):
    assert largest_error(kind, words, schedule) <= 5e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "schedule"),
    [("capacity", "1f1b"), *(pytest.param("dropless", word, marks=MANY) for word in ("gpipe", "1f1b", "zb"))],
)
def test_experts_equal_one_device_in_float64(kind, schedule):
    with jax.enable_x64(True):
        assert largest_error(kind, "pp:2 dp:2 ep:2", schedule, jnp.float64) <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dropless", pytest.param("capacity", marks=MANY)])
def test_a_device_holds_the_experts_of_its_own_stage(kind):
    step, _, args = planned_step(kind, "pp:2 dp:2 ep:2", "1f1b")
    made = step.plan(*args)
    specs = {leaf.path: leaf.spec for leaf in made.inputs}
    assert tuple(specs["0/up"])[:2] == tuple(specs["0/down"])[:2] == ("pp", "ep")
    assert not [line for move, axes, _, line in made.traffic if (move, axes) == ("all-gather", "pp")], "router"
    rows = {"dropless": {"all-gather", "reduce-scatter"}, "capacity": {"all-to-all"}}[kind]
    assert rows <= {move for move, axes, *_ in made.traffic if axes == "ep"}
    text = made.jit().lower(*args).compile().as_text()
    gathered = re.findall(r"= \w+\[([\d,]+)\]\S* all-gather\(", text)
    assert not [shape for shape in gathered if re.search(rf"\b{EXPERTS},(16,32|32,16)$", shape)], "weights of all"


@pytest.mark.few(1)
@pytest.mark.parametrize(("way", "kind"), [("ulysses", "all-to-all"), ("ring", "collective-permute")])
def test_no_device_gathers_a_sequence_in_a_stage(way, kind):
    fn, *args = step_and_arguments("window")
    made = plan(fn, *args, target="cpu:8", plan=f"pp:2 dp:2 {way}:2", microbatches=4)
    assert kind in {move for move, axes, *_ in made.traffic if axes == way}
    text = made.jit().lower(*args).compile().as_text()
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
    assert not [shape for shape in gathered if str(SEQ) in shape.split(",")], "a whole sequence"


@pytest.mark.parametrize(("rows", "named"), [(8, "batch"), (16, "replicas*batch")])  # a size of 1 has no axis
def test_the_microbatches_of_no_leaf_are_a_sequence(rows, named):
    def step(weights, x, documents):
        run = lambda x, each: (layer("attention", x, each, documents), None)  # noqa: E731
        return jax.value_and_grad(lambda weights: (jax.lax.scan(run, x, weights)[0] ** 2).mean())(weights)

    weights = step_and_arguments("attention")[1]
    shape = jax.ShapeDtypeStruct
    batch = shape((rows, SEQ, EMBED), jnp.float32), shape((rows, SEQ), jnp.int32)
    made = plan(step, weights, *batch, target="cpu:8", plan="pp:2 dp:2 ring:2", microbatches=4)
    assert [tuple(made.in_specs[n]) for n in (1, 2)] == [("dp", "ring")] * 2
    axes = [made.logical_axes[name] for name in ("x", "documents")]
    assert axes == [(f"{named}*microbatch", "seq", "embed"), (f"{named}*microbatch_1", "seq")]


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "words"), [("dropless", {"pp:4 ep:2"}), ("window", {"pp:2 ring:4 state"})])
def test_they_compete_in_searches_of_pipelines(kind, words, monkeypatch):
    monkeypatch.setattr(time_floors, "KEPT_CANDIDATES", 10**6)  # else those that are too slow are not priced
    # else the plan is one with groups of rows, whose candidates all have dp
    monkeypatch.setattr(planning, "promising_groups", lambda *args, **options: None)
    fn, *args = step_and_arguments(kind)
    made = plan(fn, *args, target="cpu:8", schedule="1f1b", microbatches=4, gather="repeat")
    assert words <= {name for name, *_ in made.candidates}
