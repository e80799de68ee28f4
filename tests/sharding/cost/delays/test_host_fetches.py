"""The memory of slices that a loop fetches from the host."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from autoshard import plan

ROWS, WIDTH, LAYERS, CLASSES = 65_536, 1024, 4, 32_768
SLICE = ROWS * WIDTH * 2 / 8  # bytes of a layer's value on one of eight devices


def temporary_bytes(*host, target="v6e:2x4"):
    """The estimate of a step with two matrices per layer, a large head, and named values in host memory.

    The backward pass of a layer needs `early` first, and `input` last.
    """
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=host, offload_src="device", offload_dst="pinned_host"
    )

    @partial(jax.checkpoint, policy=policy)
    def layer(x, w):
        x = checkpoint_name(x, "input")
        early = checkpoint_name(x @ w["up"], "early")
        return jnp.tanh(jnp.tanh(early) @ w["mid"]) @ w["down"], None

    def loss(w, x):
        logits = jax.lax.scan(layer, x, w["layers"])[0] @ w["head"]
        return jnp.sum(jnp.square(logits.astype(jnp.float32)))

    def step(w, x):
        return jax.grad(loss)(w, x)

    stacks = {k: jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.bfloat16) for k in ("up", "mid", "down")}
    w = {"layers": stacks, "head": jax.ShapeDtypeStruct((WIDTH, CLASSES), jnp.bfloat16)}
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)
    return plan(step, w, x, plan="dp:8", target=target).estimate.memory_bytes["temporary"]


def test_slices_that_are_fetched_ahead_wait_for_their_loop_beside_the_logits(monkeypatch):
    """The first iteration's input is fetched while the loss is computed."""
    from autoshard.sharding.cost import peak_memory

    both = temporary_bytes("input")
    monkeypatch.setattr(peak_memory, "fetch_buffers", lambda *args: [])
    assert both - temporary_bytes("input") == pytest.approx(SLICE, rel=0.02)


def test_slices_that_are_fetched_in_their_iteration_do_not_wait(monkeypatch):
    """In these small layers, compute is much shorter than transfers. So transfers take no time here."""
    from autoshard.sharding.cost.delays import host_fetches
    from autoshard.sharding.loops import host_moves

    monkeypatch.setattr(host_moves, "HOST_BANDWIDTH_REACHED", 1e9)
    chosen = temporary_bytes("input", "early")
    # The compiler fetches all slices ahead.
    monkeypatch.setattr(host_fetches, "host_moves", lambda program, chip: {})
    by_compiler = temporary_bytes("input", "early")
    assert by_compiler - chosen == pytest.approx(SLICE, rel=0.02)


def test_other_platforms_fetch_a_slice_when_it_is_used(monkeypatch):
    from autoshard.sharding.cost import peak_memory

    before = temporary_bytes("input", target="h100:8")
    monkeypatch.setattr(peak_memory, "fetch_buffers", lambda *args: [])
    assert temporary_bytes("input", target="h100:8") == before
