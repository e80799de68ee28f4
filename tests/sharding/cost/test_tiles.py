"""Arrays in the tiles of a TPU's memory."""

import jax
import jax.numpy as jnp
import pytest

from autoshard import operator, plan
from autoshard.models.workloads import workload
from autoshard.train.program.build import workload_step


def temporary(fn, *shapes, target="v5e:1x1"):
    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    return plan(fn, *arrays, target=target, plan="dp:1").estimate.memory_bytes["temporary"]


@operator("b d -> b d; whole d")
def kernel(x):
    """An opaque operator."""
    return jnp.tanh(x)


@pytest.mark.parametrize(("size", "padding"), [(64, 2), (128, 1)])
def test_stacks_of_results_of_opaque_operators_have_whole_tiles(size, padding):
    def fn(x):
        stack = jax.lax.scan(lambda c, _: (c, kernel(c + 1)), x, length=8)[1]
        return jnp.sum(jnp.cumsum(stack, 0))

    rows = 4096
    assert temporary(fn, (rows, size)) >= 8 * rows * size * 4 * padding
    assert temporary(fn, (rows, size), target="h100:1x1") < 8 * rows * size * 4 * 2.5


def test_a_cast_in_a_loop_makes_a_copy_of_the_stack_on_tpus():
    def step(casts):
        def loss(stack, x):
            def layer(x, w):
                return jnp.tanh(x @ (w.astype(jnp.bfloat16).astype(jnp.float32) if casts else w)), None

            return jax.lax.scan(jax.checkpoint(layer), x, stack)[0].sum()

        return lambda stack, x: (stack - jax.grad(loss)(stack, x), x.sum())

    def difference(target):
        shapes = (8, 512, 512), (16, 512)
        return temporary(step(True), *shapes, target=target) - temporary(step(False), *shapes, target=target)

    copy = 8 * 512 * 512 * 2
    assert difference("v5e:1x1") >= 0.9 * copy
    assert difference("h100:1x1") < 0.5 * copy


def test_parameters_that_a_loop_casts_have_a_copy_on_tpus():
    """Compiled for v5e:2x4: 7.10 GiB with 8 layers, 14.39 with 20."""

    def estimate(layers, target="v5e:2x4"):
        work = workload("gpt-1.3b").with_(batch_size=256, layers=layers, remat="keep:context+out_proj+mlp_in")
        made = plan(*workload_step(work, 2), target=target, plan="fsdp:8", donate_argnums=0)
        return made.estimate.peak_memory_bytes / 2**30

    assert estimate(8) == pytest.approx(7.10, rel=0.05)
    assert estimate(20) == pytest.approx(14.39, rel=0.05)


def test_products_of_rows_with_rows_take_the_time_of_their_bytes():
    """XLA compiles them as sums of elementwise products, so the matrix unit's tiles do not matter."""

    def us(spec, *shapes):
        arrays = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
        return plan(lambda *x: jnp.einsum(spec, *x), *arrays, target="v5e:1x1", plan="dp:1").estimate.step_time_us

    rows = 8, 2048, 64, 64
    bytes_us = 2 * 2 * 8 * 2048 * 64 * 64 / 819e9 * 1e6  # of both operands, in bfloat16
    assert bytes_us < us("bshd,bshd->bsh", rows, rows) < 2 * bytes_us
    assert us("bshd,bthd->bhst", rows, rows) > 20 * bytes_us
