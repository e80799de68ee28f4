"""Recomputation that XLA merges with the forward pass."""

import jax
import jax.numpy as jnp
import pytest

from autoshard import plan
from autoshard.spmdrules.ir.merged_recomputation import merged_values
from autoshard.spmdrules.ir.program import build

W, X = jax.ShapeDtypeStruct((16, 16), "float32"), jax.ShapeDtypeStruct((64, 16), "float32")


def gradient(prevent_cse, looped=False):
    def layer(x, w):
        return jnp.tanh(jnp.sin(x @ w) * 2.0)

    def loss(w, x):
        one = jax.checkpoint(layer, prevent_cse=prevent_cse)
        if looped:
            return jnp.sum(jax.lax.scan(lambda c, _: (one(c, w), None), x, None, length=2)[0])
        return jnp.sum(one(one(x, w), w))

    return jax.grad(loss)


@pytest.mark.parametrize(
    ("prevent_cse", "looped", "products"), [(False, False, 2), (True, False, 0), (False, True, 0), (True, True, 0)]
)
def test_values_are_merged_only_without_a_barrier_and_outside_of_loops(prevent_cse, looped, products):
    program = build(jax.make_jaxpr(gradient(prevent_cse, looped))(W, X))
    merged = merged_values(program)
    maker = {v: op for op in program.ops() for v in op.results}
    assert sum(maker[v].name == "dot_general" for v in merged) == products
    assert all(maker[v].name == maker[kept].name and kept < v for v, kept in merged.items())


def masked(x, w, at_least):
    """A layer whose mask is a call with a literal."""
    return jnp.where(x > at_least, x, -jnp.inf) @ w


@pytest.mark.parametrize(("second", "products"), [(0.0, 1), (1.0, 0)])
def test_calls_with_equal_literals_are_merged(second, products):
    """The -inf of a mask is a literal in both passes. Layers that differ in a literal only are not merged."""

    def both(x, w):
        one = jax.jit(masked)(x, w, 0.0)
        other = jax.checkpoint(jax.jit(masked), prevent_cse=False)(x, w, second)
        return jax.grad(lambda x: jnp.sum(jax.checkpoint(jnp.sin, prevent_cse=False)(x)))(one + other)

    program = build(jax.make_jaxpr(both)(X, W))
    maker = {v: op for op in program.ops() for v in op.results}
    assert sum(maker[v].name == "dot_general" for v in merged_values(program)) == products


def test_values_are_merged_within_a_loop_over_microbatches():
    def step(w, xs):
        def add(total, x):
            return total + gradient(prevent_cse=False)(w, x), None

        return jax.lax.scan(add, jnp.zeros_like(w), xs)[0]

    program = build(jax.make_jaxpr(step)(W, jax.ShapeDtypeStruct((4, 64, 16), "float32")))
    maker = {v: op for op in program.ops() for v in op.results}
    assert sum(maker[v].name == "dot_general" for v in merged_values(program)) == 2


def test_what_is_merged_is_computed_and_gathered_once():
    """About as without `jax.checkpoint`, where cosines are stored, too."""

    def estimate(checkpoint):
        def loss(w, x):
            for _ in range(3):
                x = checkpoint(lambda x, w: jnp.tanh(jnp.sin(x @ w) @ w.T))(x, w)
            return jnp.sum(x)

        shapes = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((1024, 1024), (65_536, 1024))]
        found = plan(jax.grad(loss), *shapes, plan="fsdp:8", target="v5e:2x4").estimate
        return found.compute_us, found.comm_bytes

    plain, merged, kept_apart = (
        estimate(checkpoint)
        for checkpoint in (
            lambda layer: layer,
            lambda layer: jax.checkpoint(layer, prevent_cse=False),
            jax.checkpoint,
        )
    )
    assert merged[0] == pytest.approx(plain[0], rel=0.1) and merged[1] == plain[1]
    assert kept_apart[0] > 1.1 * plain[0] and kept_apart[1] > 1.1 * plain[1]


def test_merged_values_are_kept_in_memory():
    def step(prevent_cse):
        def block(x, w):
            return x + jnp.tanh(x @ w) @ w.T

        def loss(w, x):
            for _ in range(6):
                x = jax.checkpoint(block, prevent_cse=prevent_cse)(x, w)
            return jnp.sum(x)

        shapes = [jax.ShapeDtypeStruct(s, "bfloat16") for s in ((64, 1024), (65_536, 64))]
        return plan(jax.grad(loss), *shapes, plan="dp:8", target="cpu:8").estimate.memory_bytes["temporary"]

    hidden = 65_536 * 1024 * 2 / 8
    assert step(False) - step(True) >= 4 * hidden
