"""Offloaded steps as the TPU's compiler compiles them."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

from autoshard import plan

LAYERS, EMBED, FFN, ROWS = 6, 256, 512, 8192


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_residuals_of_stages_wait_on_the_host() -> None:
    """Each stage has slots in host memory, which its loop over the ticks writes and reads in place."""

    def step(params: Any, x: jax.Array) -> Any:
        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            return x + checkpoint_name(jax.nn.gelu(x @ w["up"]), "hidden") @ w["down"], None

        loss = lambda params: jnp.mean(jax.lax.scan(layer, x, params)[0].astype("float32") ** 2)  # noqa: E731
        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value

    params = {
        "up": jax.ShapeDtypeStruct((8, EMBED, 2 * FFN), "bfloat16"),
        "down": jax.ShapeDtypeStruct((8, 2 * FFN, EMBED), "bfloat16"),
    }
    x = jax.ShapeDtypeStruct((ROWS, EMBED), "bfloat16")
    options = {"target": "v5e:2x2", "plan": "pp:4", "microbatches": 8, "schedule": "1f1b", "donate_argnums": 0}
    made = plan(step, params, x, offload="hidden", **options)
    audit = made.verify()
    value = 2 * ROWS // 8 * 2 * FFN * 2  # bytes of a microbatch in the two layers of a stage
    assert audit.host_bytes == 7 * value, "2 N - 1 slots"
    assert made.estimate.host_memory_bytes == 8 * value, "and a value on its way"
    ticks = 8 + 4 - 1
    for to_host in (True, False):
        assert sum(t.bytes * t.trips for t in audit.transfers if t.to_host == to_host) == ticks * value
    without = plan(step, params, x, **options).verify().peak_bytes
    assert audit.peak_bytes is not None and without is not None
    assert audit.peak_bytes < without - 5 * value


@pytest.mark.slow
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
    assert sum(t.bytes * t.trips for t in sent) == stack
    assert sum(t.bytes * t.trips for t in back) == stack + stack / LAYERS, "each iteration fetches for the next one"
    assert {t.name.partition(".")[0] for t in audit.transfers} >= {"dynamic-slice-start", "dynamic-update-slice-start"}
    scheduled = made.verify(until="schedule")
    transfers = [[(t.name, t.bytes, t.trips, t.to_host) for t in each.transfers] for each in (scheduled, audit)]
    assert sorted(transfers[0]) == sorted(transfers[1])
    assert scheduled.host_us == pytest.approx(audit.host_us) and scheduled.cycles is None


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_the_state_of_the_optimizer_waits_on_the_host() -> None:
    """The loop over the layers of the update gathers nothing, and moments of biases stay on the device."""
    optimizer = optax.adamw(1e-3)

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return x + jax.nn.gelu(x @ w["up"] + w["bias"]) @ w["down"], None

    def step(params: Any, moments: Any, x: jax.Array) -> Any:
        loss = lambda params: jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params)[0] ** 2)  # noqa: E731
        value, gradients = jax.value_and_grad(loss)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, value

    shapes = {"up": (LAYERS, 2 * EMBED, 4 * FFN), "bias": (LAYERS, 4 * FFN), "down": (LAYERS, 4 * FFN, 2 * EMBED)}
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    arguments = params, jax.eval_shape(optimizer.init, params), jax.ShapeDtypeStruct((256, 2 * EMBED), "float32")
    options: Any = {"target": "v5e:2x2", "plan": "fsdp:4", "donate_argnums": (0, 1)}
    made = plan(step, *arguments, offload="optimizer", **options)
    moved = 2 * 2 * LAYERS * 2 * EMBED * 4 * FFN * 4
    assert made.offload == {"optimizer": moved}
    audit, without = made.verify(), plan(step, *arguments, **options).verify()
    assert audit.ok and (audit.wire_bytes or 0) <= 1.02 * (without.wire_bytes or 0), str(audit)
    for to_host in (True, False):
        assert sum(t.bytes * t.trips for t in audit.transfers if t.to_host == to_host) == pytest.approx(moved / 4, 0.2)
    peaks = audit.peak_bytes, made.verify(until="schedule").peak_bytes
    assert max(peak or math.inf for peak in peaks) < (without.peak_bytes or 0) - 0.5 * moved / 4
