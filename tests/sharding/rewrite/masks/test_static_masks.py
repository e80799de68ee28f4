"""Masks that depend on positions only."""

import gc

import jax
import jax.numpy as jnp
import pytest

from autoshard import plan
from autoshard.sharding.rewrite.masks import static_masks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "replaced"), [("irregular", False), pytest.param("causal", True, marks=pytest.mark.slow)]
)
def test_evaluated_masks_are_freed_with_the_program(name, replaced):
    def attention(q, k, v):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4
        rows, columns = jnp.arange(scores.shape[-2])[:, None], jnp.arange(scores.shape[-1])
        mask = columns <= rows if name == "causal" else jnp.sin(columns) * rows > 0.3
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), -1)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v).sum()

    gc.collect()
    before = len(static_masks._known)
    made = plan(attention, *[jax.ShapeDtypeStruct((8, 128, 4, 16), "float32")] * 3, target="cpu:8", kernels="auto")
    assert [record.replaced for record in made.kernels] == [replaced]
    del made
    gc.collect()
    assert len(static_masks._known) == before
