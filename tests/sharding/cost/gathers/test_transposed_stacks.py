"""Transposed copies of stacks that loops gather on GPUs."""

import jax
import jax.numpy as jnp
import pytest

from autoshard import plan
from autoshard.sharding.cost.gathers.transposed_stacks import transposed_stacks
from autoshard.sharding.planner.bound_plan import bound_or_error

LAYERS, WIDTH, HIDDEN = 4, 512, 2048


def step(params, x):
    def layer(x, w):
        up, down = (each.astype(jnp.bfloat16) for each in w)
        return x + jnp.tanh(x @ up) @ down, None

    def loss(params):
        return jnp.sum(jax.lax.scan(layer, x, params)[0].astype(jnp.float32))

    return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))


def planned(target, strategy="fsdp:8"):
    shapes = [(LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH)]
    params = tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    x = jax.ShapeDtypeStruct((1024, WIDTH), "bfloat16")
    return bound_or_error(plan(step, params, x, plan=strategy, target=target, donate_argnums=0).bound)


def test_a_stack_has_a_copy_where_a_later_dimension_is_gathered():
    """Both weights are stored along `HIDDEN`, the last dimension of the first and the first one of the second."""
    bound = planned("h100:1x8")
    memory, layout = bound.problem.memory, bound.layout
    (copy,) = transposed_stacks(layout, memory.stack_uses)
    assert copy.nbytes == 4 * LAYERS * WIDTH * HIDDEN / 8
    loops = [n for n, op in enumerate(layout.axes.program.ops()) if op.name == "scan"]
    assert len(loops) == 2 and copy.first == [loops[0]] and copy.last > loops[1]
    buffers = bound.problem.cost(layout).live_buffers
    with_copy = memory(layout, buffers)[1]["temporary"]
    memory.stack_uses = {}
    assert with_copy - memory(layout, buffers)[1]["temporary"] == pytest.approx(copy.nbytes, rel=0.01)


@pytest.mark.parametrize(("target", "strategy"), [("v5e:2x4", "fsdp:8"), ("h100:1x8", "dp:8"), ("h100:1x8", "tp:8")])
def test_no_stack_has_a_copy_on_tpus_or_where_none_is_gathered(target, strategy):
    bound = planned(target, strategy)
    assert transposed_stacks(bound.layout, bound.problem.memory.stack_uses) == []
