"""Residuals of stages that wait in host memory."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from autoshard import Plan, _compat, auto_shard, plan
from autoshard.errors import PlanError
from autoshard.sharding.pipeline.slots import empty_slots, layer_on_device

LAYERS, ROWS, EMBED, FFN = 8, 64, 16, 32


def make_step(unrolled=False):
    """Return a step whose layers name what lies between their products, and what is before them."""

    def layer(y, w):
        return y + checkpoint_name(jnp.tanh(y @ w[0]), "hidden") @ w[1], None

    def step(weights, x):
        def loss(weights):
            y = checkpoint_name(jnp.tanh(x @ weights["first"]), "start") @ weights["first"]
            for n in range(LAYERS) if unrolled else ():
                y, _ = layer(y, [w[n] for w in weights["layers"]])
            y = y if unrolled else jax.lax.scan(layer, y, weights["layers"])[0]
            return (y**2).mean()

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    return step


def arguments():
    draw = lambda n, *shape: jax.random.normal(jax.random.key(n), shape) * 0.3  # noqa: E731
    layers = draw(0, LAYERS, EMBED, FFN), draw(1, LAYERS, FFN, EMBED)
    return {"first": draw(2, EMBED, EMBED), "layers": layers}, draw(3, ROWS, EMBED)


@pytest.mark.filterwarnings("ignore:.*devices")
@pytest.mark.parametrize(
    ("words", "schedule"),
    [
        ("pp:2 dp:2 tp:2", "1f1b"),
        pytest.param("pp:4 fsdp:2", "zb", marks=pytest.mark.slow),
        pytest.param("pp:2 dp:4", "interleaved:2", marks=pytest.mark.slow),
        pytest.param("pp:4 dp:2", "gpipe", marks=pytest.mark.slow),
    ],
)
def test_results_are_those_of_one_device(words, schedule):
    fn, args = make_step(), arguments()
    step = auto_shard(fn, plan=words, microbatches=4, schedule=schedule, offload="hidden")
    for one, other in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        assert np.linalg.norm(one - other) <= 5e-6 * np.linalg.norm(other)
    assert step.plan(*args).offload == {"hidden": LAYERS * ROWS * FFN * 4}


def test_slots_are_in_host_memory():
    options = {"target": "cpu:2", "plan": "pp:2", "microbatches": 8, "schedule": "1f1b"}
    made = plan(make_step(), *arguments(), offload="hidden", **options)
    value = LAYERS // 2 * ROWS // 8 * FFN * 4  # bytes that a stage keeps of a microbatch
    assert made.estimate.host_memory_bytes == (3 + 1) * value  # 2 N - 1 slots, and a value on its way
    ticks = 8 + 2 - 1
    assert made.estimate.host_traffic_bytes == 2 * ticks * value
    saved = plan(make_step(), *arguments(), **options).estimate.peak_memory_bytes - made.estimate.peak_memory_bytes
    assert saved >= 2 * value
    bound = Plan.from_json(made.to_json()).bind(make_step(), *arguments())
    assert bound.estimate == made.estimate


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"offload": "hidden", "schedule": "ftb"}, "inputs, and no residuals.*'optimizer', or schedule='gpipe'"),
        ({"offload": "start"}, "value at .*test_slots.py.* is not one that the layers at .* keep for their"),
        ({"offload": "hidden", "unrolled": True}, "layers that are no jax.lax.scan keep their residuals in device"),
    ],
)  # fmt: skip
def test_what_stays_on_the_device(options, reason):
    fn = make_step(options.pop("unrolled", False))
    with pytest.raises(PlanError, match=f"pp:2 .*{reason}.*, or leave out pp:2"):
        plan(fn, *arguments(), target="cpu:2", plan="pp:2", microbatches=8, **options)


def test_a_policy_of_the_step_is_named_where_its_values_cannot_move():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["start"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def step(weights, x):
        def layer(y, w):
            y = checkpoint_name(y, "start")
            return y + jnp.tanh(y @ w[0]) @ w[1], None

        def loss(weights, x):
            return (jax.lax.scan(jax.checkpoint(layer, policy=policy), x, weights["layers"])[0] ** 2).mean()

        return jax.grad(loss)(weights, x)

    with pytest.raises(PlanError, match="own policy moves to the host: .*; let the policy keep them on the device"):
        plan(step, *arguments(), target="cpu:2", plan="pp:2", microbatches=8, schedule="1f1b")


def test_offload_auto_moves_residuals_of_stages_only_if_nothing_else_fits():
    options = {"target": "cpu:2", "plan": "pp:2", "microbatches": 8, "schedule": "1f1b", "offload": "auto"}
    plain = plan(make_step(), *arguments(), **options)
    assert not plain.offload
    limit = plain.estimate.peak_memory_bytes - 1
    assert "hidden" in plan(make_step(), *arguments(), memory_limit_bytes=limit, **options).offload


@pytest.mark.parametrize(("on_host", "always", "expected"), [(True, True, 3), (True, False, 4), (False, False, 3)])
def test_the_host_has_a_slot_more_if_an_idle_stage_may_find_none_unused(on_host, always, expected):
    var = SimpleNamespace(aval=_compat.abstract_array((5,), jnp.float32, on_host=on_host))
    assert jax.eval_shape(lambda: empty_slots(3, (2, 5), var, always)).shape == (expected, 2, 5)


def test_a_layer_runs_without_its_transfers():
    def body(x):
        return jax.device_put(jnp.sin(x), jax.memory.Space.Host)

    closed = jax.make_jaxpr(body)(jnp.ones(3))
    assert "device_put" in str(closed)
    without = jax.make_jaxpr(layer_on_device(closed))(jnp.ones(3))
    assert "device_put" not in str(without) and "sin" in str(without)
