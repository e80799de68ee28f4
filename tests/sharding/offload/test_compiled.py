"""Offloaded steps as the TPU's compiler compiles them."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

from autoshard import plan
from autoshard.sharding.audit import compile_job, export_plan
from autoshard.sharding.planner.bound_plan import bound_or_error

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


def layers_step() -> tuple[Any, ...]:
    """Return a step whose scanned layers keep `context`, and the shapes of its arguments."""
    width, hidden, rows = 2048, 7168, 131_072
    square = ("query", "key", "out")
    sizes = dict.fromkeys(square, (width, width)) | {"gate": (width, hidden), "up": (width, hidden)}
    params = {
        name: jax.ShapeDtypeStruct((LAYERS, *size), "bfloat16")
        for name, size in {**sizes, "down": (hidden, width)}.items()
    }

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("context"))
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        x = x + checkpoint_name(jnp.tanh(x @ w["query"]) @ w["key"], "context") @ w["out"]
        return x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"], None

    def step(params: Any, x: jax.Array) -> Any:
        loss = lambda params: jnp.mean(jax.lax.scan(layer, x, params)[0].astype("float32") ** 2)  # noqa: E731
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    return step, params, jax.ShapeDtypeStruct((rows, width), "bfloat16")


@pytest.mark.tpu_compile
@pytest.mark.parametrize("offload", ["residual", "context", "residual+context"])
def test_the_last_layer_stays_on_the_device(offload: str) -> None:
    """The device waits for no transfer, and the loops copy one value in its memory: the input of the last layer."""
    values = len(offload.split("+"))
    made = plan(*layers_step(), target="v5e:2x4", plan="fsdp:8", offload=offload, donate_argnums=0)
    audit = made.verify(until="schedule")
    one = 131_072 * 2048 * 2 / 8
    assert sorted((t.to_host, t.trips, t.bytes) for t in audit.transfers) == sorted(
        [(True, LAYERS - 1, one), (False, LAYERS, one)] * values
    )
    assert audit.host_exposed_us == made.estimate.host_exposed_us == 0
    assert audit.host_traffic_bytes == made.estimate.host_traffic_bytes == (2 * LAYERS - 1) * values * one
    assert audit.peak_bytes == pytest.approx(made.estimate.peak_memory_bytes, rel=0.12)
    job = export_plan(bound_or_error(made.bound).executable, made.compiler_options["tpu"])
    loops, entry, _ = compile_job(job, until="schedule").text.partition("\nENTRY ")
    assert entry and len(re.findall(r"= bf16\[(?:1,)?16384,2048\]\S* copy\(", loops)) == ("residual" in offload)


def two_products(ffn: int, rows: int, *, recomputed: bool) -> tuple[Any, ...]:
    """The gradient of scanned layers of two products, and the shapes of its arguments."""

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    def loss(params: Any, x: jax.Array) -> jax.Array:
        body = jax.checkpoint(layer) if recomputed else layer
        return jnp.mean(jax.lax.scan(body, x, params)[0].astype("float32") ** 2)

    params = {
        "up": jax.ShapeDtypeStruct((LAYERS, 1024, ffn), "bfloat16"),
        "down": jax.ShapeDtypeStruct((LAYERS, ffn, 1024), "bfloat16"),
    }
    return jax.grad(loss), params, jax.ShapeDtypeStruct((rows, 1024), "bfloat16")


@pytest.mark.tpu_compile
@pytest.mark.parametrize("gather", [None, "prefetch"])
def test_what_is_kept_does_not_split_the_memory_of_the_backward_loop(gather: str | None) -> None:
    made = plan(
        *two_products(4096, 131_072, recomputed=True), target="v5p:2x2x1", plan="fsdp:4", offload="residual",
        gather=gather,
    )  # fmt: skip
    audit = made.verify(until="schedule")
    assert audit.peak_bytes == pytest.approx(made.estimate.peak_memory_bytes, rel=0.05)
    assert audit.host_traffic_bytes == made.estimate.host_traffic_bytes


@pytest.mark.tpu_compile
def test_the_last_layer_runs_in_a_loop() -> None:
    """It is no part of the straight code after the loop, where XLA could gather the weights of the head beside it."""
    made = plan(*two_products(4096, 131_072, recomputed=True), target="v5p:2x2x1", plan="fsdp:4", offload="residual")
    job = export_plan(bound_or_error(made.bound).executable, made.compiler_options["tpu"])
    assert len(re.findall(r" while\(", compile_job(job, until="schedule").text)) == 3


@pytest.mark.tpu_compile
def test_a_result_that_is_made_late_is_sent_beside_the_next_iteration() -> None:
    """The compute after it, in its own iteration, is shorter than the transfer."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["late"], offload_src="device",
        offload_dst="pinned_host",
    )  # fmt: skip

    @partial(jax.checkpoint, policy=policy)
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        for _ in range(2):
            x = jnp.tanh(x @ w["up"] @ w["down"])
        return jnp.tanh(checkpoint_name(x, "late") @ w["up"] @ w["down"]), None

    def step(params: Any, x: jax.Array) -> Any:
        return jax.grad(lambda params: jnp.mean(jax.lax.scan(layer, x, params)[0].astype("float32") ** 2))(params)

    params = {
        "up": jax.ShapeDtypeStruct((LAYERS, 2048, 8192), "bfloat16"),
        "down": jax.ShapeDtypeStruct((LAYERS, 8192, 2048), "bfloat16"),
    }
    made = plan(step, params, jax.ShapeDtypeStruct((65_536, 2048), "bfloat16"), target="v6e:2x4", plan="fsdp:8")
    audit = made.verify(until="schedule")
    assert sum(t.trips for t in audit.transfers if t.to_host) == LAYERS - 1
    assert audit.host_exposed_us == 0


@pytest.mark.tpu_compile
def test_a_fetch_that_would_be_late_is_ahead() -> None:
    """Without recomputation, the input of a layer is needed late. The compute before that is shorter than the fetch."""
    made = plan(*two_products(4096, 32_768, recomputed=False), target="v5e:2x2", plan="fsdp:4", offload="residual")
    (fetch,) = [t for t in made.verify(until="schedule").transfers if not t.to_host]
    assert fetch.trips == LAYERS and fetch.exposed_us == 0 and fetch.compute_us > fetch.us / LAYERS


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
    assert sum(t.bytes * t.trips for t in sent) == stack - stack / LAYERS, "the last layer stays on the device"
    assert sum(t.bytes * t.trips for t in back) == stack, "each iteration fetches for the next one"
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
