"""Offloaded steps as the TPU's compiler compiles them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard import plan

LAYERS, EMBED, FFN, ROWS = 6, 256, 512, 8192


@pytest.mark.tpu_compile
def test_the_inputs_of_layers_wait_on_the_host() -> None:
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params)[0].astype("float32") ** 2)

    params = {
        "up": jax.ShapeDtypeStruct((LAYERS, EMBED, FFN), "bfloat16"),
        "down": jax.ShapeDtypeStruct((LAYERS, FFN, EMBED), "bfloat16"),
    }
    x = jax.ShapeDtypeStruct((ROWS, EMBED), "bfloat16")
    made = plan(jax.grad(loss), params, x, target="v5e:2x2", plan="fsdp:4", offload="residual")
    audit = made.verify()
    stack = LAYERS * ROWS * EMBED * 2 / 4
    assert audit.host_bytes == made.estimate.host_memory_bytes == stack
    sent = [t for t in audit.transfers if t.to_host]
    back = [t for t in audit.transfers if not t.to_host]
    assert sum(t.bytes * t.trips for t in sent) == sum(t.bytes * t.trips for t in back) == stack
    assert {t.name.partition(".")[0] for t in audit.transfers} >= {"dynamic-slice-start", "dynamic-update-slice-start"}
