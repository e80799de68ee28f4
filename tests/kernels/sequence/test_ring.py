"""Attention on a ring of devices: values and gradients equal those of one device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from autoshard.kernels.blockwise_attention import Pairs, Softmax
from autoshard.kernels.plain_attention import plain_attention
from autoshard.kernels.sequence.exchange import exchanged, restored
from autoshard.kernels.sequence.ring import Keys, Ring, Rows, ring_backward, ring_forward
from autoshard.kernels.sequence.ring_cost import ring_cost
from autoshard.kernels.splash_blocks import SplashBlocks
from autoshard.kernels.splash_passes import OnDevice, SplashCall
from autoshard.kernels.visibility import Visibility
from autoshard.spmdrules.custom_ops.kernel_cost import KernelCost

BATCH, KV_HEADS, GROUP, HEAD_DIM = 2, 2, 2, 8
CASES = {
    "causal, odd number of devices": (Visibility(causal=True), 3, 96, True),
    "full": (Visibility(), 8, 128, False),
    "full, segments": (Visibility(), 4, 64, True),
    "causal": (Visibility(causal=True), 8, 128, False),
    "causal, segments": (Visibility(causal=True), 4, 128, True),
    "causal, chunks of odd length": (Visibility(causal=True), 4, 60, False),
    "causal, window of three devices": (Visibility(causal=True, window=40), 8, 128, True),
    "window of one device": (Visibility(causal=True, window=3), 8, 64, False),
    "two-sided window": (Visibility(window=20), 4, 64, False),
}


def on_ring(fn, devices, specs, outs):
    mesh = jax.make_mesh((devices,), ("ring",), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,))
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=False))


@pytest.mark.parametrize("devices", [3, 4, 8])
def test_exchanged_chunks_are_early_and_late(devices):
    def run(x):
        early, late = exchanged(x, 0, ("ring",))
        return early, late, restored((early, late), 0, ("ring",))

    x = jnp.arange(2 * devices)
    spec = P("ring")
    early, late, back = on_ring(run, devices, (spec,), (spec, spec, spec))(x)
    assert early.tolist() == list(range(devices))
    assert late.tolist() == list(range(2 * devices - 1, devices - 1, -1))
    assert back.tolist() == x.tolist()


@pytest.mark.few(1)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_equal_one_device(case):
    visibility, devices, length, has_segments = CASES[case]
    softmax = Softmax(visibility, 1.0, 3.0)
    draw = np.random.default_rng(0).normal
    q = jnp.asarray(draw(size=(BATCH, KV_HEADS, GROUP, length, HEAD_DIM)), jnp.float32)
    k, v = (jnp.asarray(draw(size=(BATCH, KV_HEADS, length, HEAD_DIM)), jnp.float32) for _ in range(2))
    d_out = jnp.asarray(draw(size=q.shape), jnp.float32)
    segments = jnp.asarray(np.sort(np.random.default_rng(1).integers(0, 4, (BATCH, length)), axis=1))
    call = SplashCall(softmax, None)

    def run(q, k, v, d_out, segments):
        segments = segments if has_segments else None
        ring = Ring(("ring",), softmax, OnDevice(call))
        rows, keys = Rows(q, segments), Keys(k, v, segments)
        out, log_sum = ring_forward(ring, rows, keys, None)
        return out, *ring_backward(ring, rows._replace(out=out, log_sum=log_sum, d_out=d_out), keys)

    rows, keys = P(None, None, None, "ring"), P(None, None, "ring")
    specs = (rows, keys, keys, rows, P(None, "ring"))
    found = on_ring(run, devices, specs, (rows, rows, keys, keys))(q, k, v, d_out, segments)

    def plain(q, k, v):
        pairs = Pairs(None, None, segments, segments) if has_segments else Pairs()
        q, k, v = jnp.einsum("bkgsd->bskgd", q), jnp.einsum("bktd->btkd", k), jnp.einsum("bktd->btkd", v)
        return jnp.einsum("bskgd->bkgsd", plain_attention(softmax, q, k, v, pairs, None))

    out, pull = jax.vjp(plain, q, k, v)
    for name, a, b in zip(("out", "d_q", "d_k", "d_v"), found, (out, *pull(d_out)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5, err_msg=name)


def test_operands_of_float32_where_float64_is_enabled():
    with jax.enable_x64(True):
        test_values_and_gradients_equal_one_device("window of one device")


@pytest.mark.slow
@pytest.mark.parametrize("visibility", [Visibility(causal=True), Visibility(causal=True, window=200), Visibility()])
def test_the_kernels_of_tpus_run_on_a_ring(visibility):
    """Pallas interprets them. The last device has rows without a visible key, those of a segment of their own."""
    length, blocks = 512, SplashBlocks((128, 128, 128), (128, 128, 128), (128, 128))
    draw = np.random.default_rng(0).normal
    q = jnp.asarray(draw(size=(1, 1, 2, length, 32)) * 0.3, jnp.float32)
    k, v = (jnp.asarray(draw(size=(1, 1, length, 32)), jnp.float32) for _ in range(2))
    d_out = jnp.asarray(draw(size=q.shape), jnp.float32)
    of_queries = (jnp.arange(length) // 200)[None]
    segments = of_queries, jnp.where(of_queries == 2, 7, of_queries)

    def run(call, q, k, v, d_out, *segments):
        ring = Ring(("ring",), call.softmax, OnDevice(call))
        rows, keys = Rows(q, segments[0]), Keys(k, v, segments[1])
        out, log_sum = ring_forward(ring, rows, keys, None)
        return out, *ring_backward(ring, rows._replace(out=out, log_sum=log_sum, d_out=d_out), keys)

    rows, keys = P(None, None, None, "ring"), P(None, None, "ring")
    specs = (rows, keys, keys, rows, P(None, "ring"), P(None, "ring"))
    found, expected = (
        on_ring(partial(run, call), 2, specs, (rows, rows, keys, keys))(q, k, v, d_out, *segments)
        for call in (
            SplashCall(Softmax(visibility, 1.0), blocks, interpret=True),
            SplashCall(Softmax(visibility, 1.0), None),
        )
    )
    for name, a, b in zip(("out", "d_q", "d_k", "d_v"), found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4, err_msg=name)


@pytest.mark.parametrize("visibility, chunks", [(Visibility(causal=True), 3), (Visibility(), 0)])
def test_a_balanced_hop_reads_two_chunks_of_each_array_and_writes_one(visibility, chunks):
    """The arrays are queries, keys and values. The backward pass also has the gradients of the results."""
    call = SplashCall(Softmax(visibility, 1.0), None, False, None)
    q = jax.ShapeDtypeStruct((1, 2, 3, 64, HEAD_DIM), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, 2, 64, HEAD_DIM), jnp.bfloat16)
    of_q, of_k = (2 * HEAD_DIM * 2 * 32 * group for group in (3, 1))  # bytes of a chunk
    none = KernelCost(1.0, 2, 0.0)
    for others, arrays in (((), (of_q, of_k, of_k)), ((q, q, q), (of_q, of_k, of_k, of_q, of_q))):
        cost = ring_cost(lambda *_, call: none, call, 4, q, k, k, *others)
        assert cost.kernels[-1].moved_bytes == 3 * chunks * sum(arrays)
