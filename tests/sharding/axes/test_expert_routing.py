"""Experts are sharded over the mesh axes of the batch, and the router's experts are a separate logical axis."""

import jax
import jax.numpy as jnp
import pytest

from autoshard import plan
from autoshard.models.workloads import workload
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.train.program.build import workload_step

TINY = workload("moe-tiny")


def axes_and_spec(plan, end):
    """The logical axes and the spec of the only parameter whose path ends with `end`."""
    (leaf,) = [leaf for leaf in plan.inputs if leaf.path.endswith(end) and "opt_state" not in leaf.path]
    return leaf.axes, tuple(leaf.spec)


def test_experts_and_their_router_are_two_axes():
    planned = plan(*workload_step(TINY), target="cpu:8", plan="ep:8", donate_argnums=0)
    axes, spec = axes_and_spec(planned, "experts/w_up")
    assert axes[1:] == ("experts", "embed", "ffn") and spec[1] == "ep"
    axes, spec = axes_and_spec(planned, "experts/router")
    assert axes[1] == "embed" and axes[2] != "experts" and "ep" not in spec


def test_the_batch_is_sharded_over_the_axis_of_the_experts():
    by_batch, by_experts = (
        plan(*workload_step(TINY), target="cpu:8", plan=strategy, donate_argnums=0) for strategy in ("dp:8", "ep:8")
    )
    assert axes_and_spec(by_experts, "inputs")[1] == ("ep",)
    assert by_experts.estimate.compute_us < 1.2 * by_batch.estimate.compute_us  # nothing is computed eight times
    kinds = {(kind, line.rpartition("(")[2].rstrip(")")) for kind, _, _, line in by_experts.traffic}
    assert {kind for kind, where in kinds if where == "Experts._by_capacity"} == {"all-to-all"}
    assert not any(kind in ("all-gather", "all-reduce") and "multiply" in where for kind, where in kinds)


def test_masks_stay_with_their_tokens_where_experts_take_a_sum_over_them():
    """With `remat=full`, hidden units are multiplied by gates: sums of masks over tokens."""
    full = plan(*workload_step(TINY.with_(remat="full")), target="cpu:8", plan="ep:8", donate_argnums=0)
    bound = bound_or_error(full.bound)
    axes, (experts,) = bound.layout.axes, bound.problem.roles.experts
    config = TINY.config
    mask = (TINY.batch_size, config.gpt.context, config.experts, config.capacity(config.gpt.context))
    found = {axes.of_value[v][2] for v, aval in enumerate(axes.program.avals) if aval.shape == mask}
    assert found and all(experts not in dim for dim in found)


def test_a_norm_over_the_width_of_experts_stays_with_them():
    """The gradient of combine weights is a sum over the width, but the width is no axis of tokens."""
    width, hidden, experts, slots = 32, 64, 8, 16

    def loss(p, x, y):
        chances = jax.nn.softmax(x @ p["router"])
        best, chosen = jax.lax.top_k(chances, 2)
        picked = jax.nn.one_hot(chosen, experts)
        place = jnp.cumsum(picked.sum(2), axis=1) - 1
        mask = picked.sum(2)[..., None] * jax.nn.one_hot(place.astype(int), slots)
        gates = (picked * best[..., None]).sum(2)
        rows = jnp.einsum("gsec,gsd->egcd", jax.lax.stop_gradient(mask), x)
        out = jnp.einsum("egcf,efd->egcd", jax.nn.gelu(jnp.einsum("egcd,edf->egcf", rows, p["up"])), p["down"])
        out = normed(out)
        return jnp.mean((jnp.einsum("gsec,egcd->gsd", mask * gates[..., None], out) - y) ** 2)

    def normed(x):
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)

    def step(p, x, y):
        return jax.tree.map(lambda w, g: w - g, p, jax.grad(loss)(p, x, y))

    shapes = {"router": (width, experts), "up": (experts, width, hidden), "down": (experts, hidden, width)}
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((16, 32, width), "float32")
    planned = plan(step, params, x, x, target="cpu:8", plan="ep:8")
    assert not [each for each in planned.traffic if "normed" in each[3]]


def test_a_program_without_a_router_keeps_its_axes():
    planned = plan(*workload_step(workload("gpt-tiny")), target="cpu:8", donate_argnums=0)
    assert "experts" not in planned.axis_sizes


@pytest.mark.slow
def test_ep_is_chosen_where_experts_are_most_of_the_weights():
    work = workload("moe-10b")
    planned = plan(*workload_step(work), target="v5e:4x4", donate_argnums=0)
    axes, spec = axes_and_spec(planned, "experts/w_up")
    assert planned.fits and axes[1] == "experts" and spec[1] is not None
    assert axes_and_spec(planned, "inputs")[1][0] is not None  # over the mesh axes of the batch
    sharded = {axis for entry in (spec[1],) for axis in (entry if isinstance(entry, tuple) else (entry,))}
    batch = axes_and_spec(planned, "inputs")[1][0]
    assert sharded <= set(batch if isinstance(batch, tuple) else (batch,))
