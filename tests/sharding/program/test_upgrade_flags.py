"""Steps that JAX traces under its upgrade flags (`jax_remat3` and others) are planned as without the flags."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies

import autoshard
from autoshard import _compat, auto_shard
from autoshard.sharding.planner.bound_plan import bound_or_error
from tests.sharding.programs import assert_close
from tests.sharding.rewrite.formulations import einsum_where, parameters, rows
from tests.sharding.rewrite.formulations import step_of as step_with_attention

FLAGS = ("jax_remat3", "jax_custom_jvp3", "jax_custom_vjp3", "jax_scan3")
PRESENT = tuple(name for name in FLAGS if name in jax.config.values)
NAMES = checkpoint_policies.save_only_these_names("h")
OFFLOADED = checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=["h"], offload_src="device", offload_dst="pinned_host"
)


@contextlib.contextmanager
def flags(*names):
    """Switch these flags on."""
    before = {name: getattr(jax.config, name) for name in names}
    try:
        for name in names:
            jax.config.update(name, True)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def step_of(unrolled=False, **options):
    """A step of gradient descent over four layers under `jax.checkpoint` with these options."""

    @functools.partial(jax.checkpoint, **options)
    def layer(x, w):
        hidden = checkpoint_name(jax.nn.relu(jnp.sin(x) @ w["up"]), "h")
        return x + hidden @ w["down"]

    def loss(params, x):
        if unrolled:
            layers = [jax.tree.map(lambda w, i=i: w[i], params) for i in range(4)]
            return jnp.mean(functools.reduce(layer, layers, x) ** 2)
        return jnp.mean(lax.scan(lambda x, w: (layer(x, w), None), x, params)[0] ** 2)

    def step(params, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step


# JAX 0.10 has an early form of `jax_remat3`, which ignores most policies and `prevent_cse`. The present form came
# together with `jax_custom_jvp3`.
current_remat3 = pytest.mark.skipif(
    "jax_custom_jvp3" not in jax.config.values, reason="needs jax_remat3 as newer versions of JAX have it"
)


def arguments():
    up, down, x = (jax.random.normal(key, shape) / 8 for key, shape in zip(
        jax.random.split(jax.random.key(0), 3), [(4, 64, 128), (4, 128, 64), (64, 64)], strict=True))  # fmt: skip
    return {"up": up, "down": down}, x


PLANS = {
    "fsdp": {"plan": "fsdp:8"},
    "tp": {"plan": "dp:2 tp:4"},
    "microbatches": {"plan": "fsdp:8", "microbatches": 2},
    "pipeline": {"plan": "pp:2 dp:4", "microbatches": 4},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", PLANS)
def test_results_are_those_of_one_device(name):
    step, given = step_of(policy=NAMES), arguments()
    expected = jax.jit(step)(*given)
    with flags(*PRESENT):
        assert_close(expected, auto_shard(step, **PLANS[name])(*given))


@current_remat3
def test_saved_values_wait_in_host_memory():
    step, given = step_of(policy=NAMES), arguments()
    expected = jax.jit(step)(*given)
    with flags(*PRESENT):
        planned = auto_shard(step, plan="fsdp:8", offload="h")
        assert_close(expected, planned(*given))
        assert dict(planned.plan(*given).offload) == {"h": 4 * 64 * 128 * 4}


CHECKPOINTS = {
    "everything recomputed": {},
    "names saved": {"policy": NAMES},
    "names offloaded": {"policy": OFFLOADED},
    "products saved": {"policy": checkpoint_policies.dots_saveable},
    "merged": {"prevent_cse": False},
    "some operands pinned": {"prevent_cse": (True, False)},
    "unrolled": {"unrolled": True},
}


@current_remat3
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_plans_are_those_without_the_flags(name):
    def planned():
        made = autoshard.plan(step_of(**CHECKPOINTS[name]), *arguments(), target="v5e:2x4", plan="fsdp:8")
        names = {op.name for op in bound_or_error(made.bound).traced.program.ops()}
        return made.estimate, made.in_specs, "remat2" in names, "optimization_barrier" in names

    expected = planned()
    with flags(*PRESENT):
        assert planned() == expected
    assert expected[2:] == (True, False)


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_a_function_that_is_not_differentiated_keeps_its_checkpoints(prevent_cse):
    fn = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)), prevent_cse=prevent_cse)
    with flags(*PRESENT):
        traced = jax.make_jaxpr(lambda x: checkpoint_name(fn(x), "h"))(1.0)
    names = [eqn.primitive.name for eqn in _compat.open_jaxpr(_compat.classic(traced)).eqns]
    assert names == ["remat2", "name"]


def test_attention_is_replaced():
    step = step_with_attention(einsum_where, "full")
    with flags(*PRESENT):
        made = autoshard.plan(step, parameters(), rows(), target="cpu:8", plan="fsdp:8", kernels="require")
    assert [record.replaced for record in made.kernels] == [True]


def test_a_loop_runs_as_with_the_classic_scan():
    def last_sums(x):
        return lax.scan(lambda total, row: (total + row, total * row), jnp.zeros(8), x, reverse=True)

    x = jnp.arange(128.0).reshape(16, 8)
    expected = last_sums(x)
    with flags("jax_scan3"):
        assert_close(expected, auto_shard(last_sums)(x))
