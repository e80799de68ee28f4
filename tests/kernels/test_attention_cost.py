"""The declared cost of splash attention, against counts of blocks, and in the estimate of a plan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.kernels.attention_cost import backward_cost, forward_cost, visited_blocks
from autoshard.kernels.blockwise_attention import Softmax
from autoshard.kernels.splash_attention import SplashCall
from autoshard.kernels.splash_blocks import SplashBlocks
from autoshard.kernels.visibility import Visibility
from autoshard.models.workloads import workload
from autoshard.train.program.build import workload_step

BLOCKS = SplashBlocks((128, 256, 128), (128, 256, 128), (128, 256))


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def call(**visibility):
    return SplashCall(Softmax(Visibility(**visibility), 1.0), BLOCKS)


@pytest.mark.parametrize("visibility", [{}, {"causal": True}, {"causal": True, "window": 200}, {"window": 200}])
@pytest.mark.parametrize("queries", [1024, 512])
def test_blocks_are_those_with_a_visible_pair(visibility, queries):
    """Of a shard of the queries, the last one counts."""
    found = Visibility(**visibility)
    full = found(np.arange(1024 - queries, 1024)[:, None], np.arange(1024)[None])
    blocks = full.reshape(queries // 128, 128, 4, 256).any((1, 3))
    assert visited_blocks(found, queries, 1024, 128, 256) == blocks.sum()


def test_flops_are_those_of_the_products_in_visited_blocks():
    q, k, v = array(2, 4, 3, 1024, 64), array(2, 4, 1024, 64), array(2, 4, 1024, 64)
    pairs = 2 * 4 * 3 * 1024 * 1024
    assert forward_cost(q, k, v, call=call()).flops == 2 * pairs * (64 + 64)
    dkv, dq = backward_cost(q, k, v, q, None, q, call=call())
    assert (dkv.flops, dq.flops) == (2 * pairs * 2 * 128, 2 * pairs * 3 * 64)
    causal = forward_cost(q, k, v, call=call(causal=True))
    assert causal.flops / forward_cost(q, k, v, call=call()).flops == 20 / 32
    assert causal.itemsize == 2 and causal.vector_ops > 0 and causal.held_bytes == 2 * 12 * 1024 * 128 * 4


def test_the_estimate_prices_the_kernel_and_not_its_fallback():
    """With the kernel, a step on a TPU has less compute and less memory than with blockwise attention."""
    estimates = {}
    for impl in ("splash", "blockwise"):
        work = workload("llama-tiny").with_(context=4096, dtype="bfloat16", attention=impl, block_size=512)
        plan = autoshard.plan(*workload_step(work), target="v6e:2x4", plan="fsdp:8", donate_argnums=0)
        estimates[impl] = plan.estimate
    assert estimates["splash"].compute_us < 0.5 * estimates["blockwise"].compute_us
    assert estimates["splash"].peak_memory_bytes < estimates["blockwise"].peak_memory_bytes
