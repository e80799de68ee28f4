"""Block sizes by shape and machine, and in plans."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from autoshard import Plan, plan
from autoshard.kernels.block_choice import BlockRules, choose_blocks, stated_vmem_bytes, under_rules, vmem_bytes
from autoshard.kernels.blockwise_attention import Pairs, Softmax
from autoshard.kernels.constants import SCOPED_VMEM_BYTES, VMEM_SHARE
from autoshard.kernels.splash_attention import splash_attention
from autoshard.kernels.splash_blocks import SplashBlocks
from autoshard.kernels.splash_passes import SplashCall, forward_on_device
from autoshard.kernels.visibility import Visibility
from autoshard.models.attention import attention
from autoshard.sharding.machines.kernel_rules import block_rules, written

SHAPE = (8192, 8192, 128, 128, 2)
CAUSAL = Softmax(Visibility(causal=True), 1.0)
LARGE, SMALL = ({"xla_tpu_scoped_vmem_limit_kib": size} for size in ("98304", "16384"))


def rules(target="v6e:1x1", options=LARGE):
    found = block_rules(None, target, (options,))
    assert found is not None
    return found


def test_the_defaults_fit_the_default_limit():
    default = choose_blocks(SHAPE, CAUSAL)
    assert default == SplashBlocks.for_shape(8192, 8192, 2) and default.forward == (1024, 1024, 512)
    assert max(vmem_bytes(default, SHAPE).values()) <= SCOPED_VMEM_BYTES
    assert block_rules(None, "v5e:1x1") is None and block_rules(None, "cpu:8", (LARGE,)) is None
    with under_rules(rules(options=SMALL)):
        assert choose_blocks(SHAPE, CAUSAL) == default


def test_more_vector_memory_allows_larger_blocks():
    found = rules()
    assert found == rules(options={})  # the default of v6e
    with under_rules(found):
        blocks = choose_blocks(SHAPE, CAUSAL)
    assert blocks.forward[:2] == (2048, 2048)
    assert max(vmem_bytes(blocks, SHAPE).values()) <= VMEM_SHARE * found.vmem_bytes
    assert choose_blocks(SHAPE, CAUSAL).forward[0] == 1024  # outside of the context


@pytest.mark.parametrize(("options", "limit"), [(LARGE, "100663296"), (SMALL, "None")])
def test_kernels_with_larger_blocks_state_the_limit_that_they_were_chosen_for(options, limit):
    """So they compile where the plan's options do not apply, as inside another `jit`."""
    q, k = (jax.ShapeDtypeStruct((1, 8192, *heads, 128), "bfloat16") for heads in ((1, 1), (1,)))
    with under_rules(rules(options=options)):
        traced = jax.make_jaxpr(lambda q, k: splash_attention(CAUSAL, q, k, k))(q, k)
        blocks = choose_blocks(SHAPE, CAUSAL)
        stated = stated_vmem_bytes(blocks, SHAPE)
    assert str(stated) == limit and f"vmem_bytes={limit}" in str(traced)
    forward = partial(forward_on_device, SplashCall(CAUSAL, blocks, vmem_bytes=stated))
    q, k = (jax.ShapeDtypeStruct((1, 1, *heads, 8192, 128), "bfloat16") for heads in ((1,), ()))
    kernel = jax.make_jaxpr(lambda q, k, at: forward(q, k, k, Pairs(at), None))(q, k, jnp.arange(8192))
    assert f"vmem_limit_bytes={limit}" in str(kernel)


def test_arrays_fill_whole_lanes():
    blocks = SplashBlocks.for_shape(8192, 8192, 2)
    assert vmem_bytes(blocks, (8192, 8192, 64, 64, 2)) == vmem_bytes(blocks, SHAPE)


def test_a_forward_kernel_with_a_large_head_needs_more_memory():
    """Compiled for v5p, it needs more than 32.84 MiB and at most 36 MiB."""
    large, shape = SplashBlocks((2048, 2048, 512), (1024, 1024, 512), (1024, 1024)), (8192, 8192, 256, 256, 2)
    assert 32.84 * 2**20 < vmem_bytes(large, shape)["forward"] < 36 * 2**20
    with under_rules(rules("v5p:1x1x1", {"xla_tpu_scoped_vmem_limit_kib": "32768"})):
        assert choose_blocks(shape, CAUSAL).forward[0] < 2048
        assert choose_blocks(SHAPE, CAUSAL).forward[:2] == (2048, 2048)


def test_the_limit_of_the_chip_holds():
    assert rules(options={"xla_tpu_scoped_vmem_limit_kib": "999999"}).vmem_bytes == 128 * 2**20
    assert rules("tpu7x:1x1x1", {"xla_tpu_scoped_vmem_limit_kib": "999999"}).vmem_bytes == 64 * 2**20
    tight = BlockRules(vmem_bytes=SCOPED_VMEM_BYTES * 1.2, flops=1e15, vector_ops=1e13, bandwidth=1e12)
    with under_rules(tight):
        assert max(vmem_bytes(choose_blocks(SHAPE, CAUSAL), SHAPE).values()) <= tight.vmem_bytes


def test_blocks_divide_the_sequence_and_are_chosen_by_price():
    with under_rules(rules()):
        assert choose_blocks((3072, 3072, 128, 128, 2), CAUSAL).forward[:2] == (1024, 1024)  # 2048 does not divide it
        # One block of 2048 x 2048 pairs costs more than three of 1024 x 1024.
        slow = BlockRules(96 * 2**20, flops=1e12, vector_ops=1e10, bandwidth=1e12)
    with under_rules(slow):
        assert choose_blocks((2048, 2048, 128, 128, 2), CAUSAL).forward[:2] == (1024, 1024)


def test_kept_blocks_take_precedence():
    kept = SplashBlocks((512, 512, 256), (512, 512, 256), (512, 512))
    with under_rules(BlockRules(kept=((SHAPE, kept),))):
        assert choose_blocks(SHAPE, CAUSAL) == kept
        assert choose_blocks((4096, 4096, 128, 128, 2), CAUSAL).forward[0] == 1024
    found = block_rules(None, "cpu:8", (), {"8192x8192x128x128x2": written(kept)})
    assert found is not None and dict(found.kept) == {SHAPE: kept}


def step(q, k):
    return jax.grad(lambda q: jnp.sum(attention(q, k, k, causal=True).astype(jnp.float32)))(q)


def test_a_plan_keeps_the_blocks_of_its_kernels():
    q = jax.ShapeDtypeStruct((8, 4096, 8, 128), "bfloat16")
    made = plan(step, q, q, target="v6e:2x4", plan="dp:8")
    small = plan(step, q, q, target="v6e:2x4", plan="dp:8", compiler_options=SMALL)
    (shape,) = made.kernel_blocks
    assert shape == "4096x4096x128x128x2" and small.kernel_blocks[shape][:3] == (1024, 1024, 512)
    assert made.kernel_blocks[shape] != small.kernel_blocks[shape]
    assert "kernel blocks: splash attention, 4096 queries x 4096 keys of 128 features: queries x keys: " in str(made)
    for before in (made, small):
        again = Plan.from_json(before.to_json()).bind(step, q, q)
        assert again.kernel_blocks == before.kernel_blocks
        assert again.bound is not None and before.bound is not None
        assert str(again.bound.traced.closed) == str(before.bound.traced.closed)
    old = small.where(kernel_blocks={shape: (512, 512, 256, 512, 512, 256, 512, 512)})
    bound = Plan.from_json(old.to_json()).bind(step, q, q).bound
    assert bound is not None and "forward=(512, 512, 256)" in str(bound.traced.closed)


def test_plans_without_kernels_have_no_blocks():
    made = plan(lambda x: x * 2, jax.ShapeDtypeStruct((8, 8), "float32"), target="cpu:8")
    assert not made.kernel_blocks and "kernel_blocks" not in made.to_json() and "kernels:" not in str(made)


@pytest.mark.parametrize("queries", [512, 1024])
def test_short_sequences_have_one_block(queries):
    with under_rules(rules()):
        assert choose_blocks((queries, queries, 128, 128, 2), CAUSAL).forward[0] == queries
