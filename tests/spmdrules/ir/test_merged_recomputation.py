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
