"""The operators of splash attention: values and gradients of the kernels, on shards, and on other platforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.kernels.blockwise_attention import Pairs, Softmax
from autoshard.kernels.plain_attention import plain_attention
from autoshard.kernels.splash_attention import splash_attention
from autoshard.kernels.splash_blocks import SplashBlocks
from autoshard.kernels.visibility import Visibility
from autoshard.spmdrules.custom_ops.opaque_primitive import is_operator

BATCH, SEQ, KV_HEADS, GROUP, HEAD_DIM = 2, 256, 2, 2, 32
BLOCKS = SplashBlocks((128, 128, 128), (128, 128, 128), (128, 128))

CASES = {
    "causal": (Visibility(causal=True), None, False, False),
    "full": (Visibility(), None, False, False),
    "window": (Visibility(causal=True, window=100), None, False, False),
    "soft cap, segments": (Visibility(causal=True), 2.0, True, False),
    "two-sided window, sinks": (Visibility(window=70), None, False, True),
    "all": (Visibility(causal=True, window=130), 5.0, True, True),
}


def operands(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 5)
    q = jax.random.normal(keys[0], (BATCH, SEQ, KV_HEADS, GROUP, HEAD_DIM), dtype)
    k, v = (jax.random.normal(key, (BATCH, SEQ, KV_HEADS, HEAD_DIM), dtype) for key in keys[1:3])
    return q, k, v, jax.random.normal(keys[3], (KV_HEADS, GROUP)), jax.random.normal(keys[4], q.shape)


def relative_errors(found, expected):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return [float(jnp.linalg.norm(a - b) / jnp.maximum(jnp.linalg.norm(b), 1e-9)) for a, b in pairs]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "case, interpret",
    [
        *((case, False) for case in CASES),
        ("window", True),
        *(pytest.param(case, True, marks=pytest.mark.slow) for case in CASES if case != "window"),
    ],
)
def test_values_and_gradients_equal_plain_attention(case, interpret):
    """With `interpret` the TPU's kernels run, else what other platforms compute."""
    visibility, soft_cap, has_segments, has_sinks = CASES[case]
    softmax = Softmax(visibility, 0.2, soft_cap)
    q, k, v, sinks, weight = operands()
    segments = jnp.broadcast_to(jnp.arange(SEQ) // 96, (BATCH, SEQ)) if has_segments else None
    pairs = Pairs(None, None, segments, segments)

    def total(is_kernel, q, k, v, sinks):
        sinks = sinks if has_sinks else None
        if is_kernel:
            both = None if segments is None else (segments, segments)
            out = splash_attention(softmax, q, k, v, segments=both, sinks=sinks, blocks=BLOCKS, interpret=interpret)
        else:
            out = plain_attention(softmax, q, k, v, pairs, sinks)
        return jnp.sum(out * weight)

    found, expected = (
        jax.jit(jax.value_and_grad(total, (1, 2, 3, 4)), static_argnums=0)(kernel, q, k, v, sinks)
        for kernel in (True, False)
    )
    assert max(relative_errors(found, expected)) < 2e-5


@pytest.mark.few(1)
@pytest.mark.parametrize("interpret", [False, True])
def test_a_row_without_a_visible_key_is_zero(interpret):
    """Queries of a segment that no key has. Their gradients are 0, and they give keys and values none."""
    softmax = Softmax(Visibility(), 0.2)
    q, k, v, _, weight = operands()
    segments = jnp.broadcast_to(jnp.where(jnp.arange(SEQ) % 2, 7, 1), (BATCH, SEQ)), jnp.ones((BATCH, SEQ), int)

    def total(is_kernel, q, k, v):
        if is_kernel:
            out = splash_attention(softmax, q, k, v, segments=segments, blocks=BLOCKS, interpret=interpret)
        else:
            out = plain_attention(softmax, q, k, v, Pairs(None, None, *segments), None)
        return jnp.sum(out * weight), out

    found, expected = (
        jax.jit(jax.value_and_grad(total, (1, 2, 3), has_aux=True), static_argnums=0)(kernel, q, k, v)
        for kernel in (True, False)
    )
    assert not np.any(found[0][1][:, 1::2]) and max(relative_errors(found, expected)) < 2e-5


def attention_step(interpret):
    """Return a step with a projection before and after attention, its parameters, and a batch."""
    softmax = Softmax(Visibility(causal=True, window=200), HEAD_DIM**-0.5)
    keys = jax.random.split(jax.random.key(1), 5)
    width, heads = 32, KV_HEADS * GROUP
    shapes = {"wq": (width, heads, HEAD_DIM), "wk": (width, KV_HEADS, HEAD_DIM), "wv": (width, KV_HEADS, HEAD_DIM)}
    params = {
        name: 0.2 * jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    params["wo"] = 0.2 * jax.random.normal(keys[3], (heads, HEAD_DIM, width))
    x = jax.random.normal(keys[4], (4, 512, width))

    def loss(params, x):
        q, k, v = (jnp.einsum("bse,ehd->bshd", x, params[name]) for name in ("wq", "wk", "wv"))
        q = q.reshape(*q.shape[:2], KV_HEADS, GROUP, HEAD_DIM)
        y = splash_attention(softmax, q, k, v, blocks=BLOCKS, interpret=interpret)
        return jnp.mean(jnp.square(jnp.einsum("bshd,hde->bse", y.reshape(*x.shape[:2], heads, HEAD_DIM), params["wo"])))

    return jax.value_and_grad(loss), params, x


@pytest.mark.slow
@pytest.mark.parametrize("interpret", [False, True])
@pytest.mark.parametrize("plan", ["dp:4 tp:2", "dp:2 tp:4", "dp:2 cp:4", "dp:2 tp:2 cp:2", "fsdp:8"])
@pytest.mark.filterwarnings("ignore:.*have work of their own")
def test_plans_keep_values_and_gradients(plan, interpret):
    """Batch, key heads, query groups and the queries' sequence are sharded."""
    step, params, x = attention_step(interpret)
    expected = jax.jit(step)(params, x)
    assert max(relative_errors(autoshard.auto_shard(step, plan=plan)(params, x), expected)) < 1e-5


def test_the_axes_of_an_opaque_kernel_are_named_and_shard():
    step, params, x = attention_step(False)
    plan = autoshard.plan(step, params, x, plan="dp:2 tp:4")
    assert plan.logical_axes["0/wq"] == ("embed", "heads*heads_1", "head_dim")
    assert plan.logical_axes["0/wv"] == ("embed", "heads", "head_dim_1")
    # Keys and values have half as many heads as `tp` has devices: their gradients are reduced, and nothing is gathered.
    assert {row[0] for row in plan.traffic if "splash" in row[3]} <= {"all-reduce", "reduce-scatter"}


@pytest.mark.slow
def test_the_rules_hold_on_shards():
    q, k, v, _, weight = operands()
    softmax = Softmax(Visibility(causal=True), 0.2)

    def gradients(q, k, v):
        return jax.grad(lambda *x: jnp.sum(splash_attention(softmax, *x, blocks=BLOCKS) * weight), (0, 1, 2))(q, k, v)

    assert autoshard.check_rule(gradients, q, k, v) == []


def test_block_sizes_divide_the_shard():
    blocks = SplashBlocks.for_shape(3 * 512, 4096, 2)
    assert blocks.forward == (768, 1024, 512) and blocks.dq == (768, 1024)
    assert blocks.fit(128, 256).forward == (128, 256, 256)
    with pytest.raises(ValueError, match="a multiple of 128 positions, not of 100"):
        blocks.fit(100, 128)


@pytest.mark.tpu_compile
@pytest.mark.slow
def test_a_tpu_gets_the_kernels():
    """Lowered for a TPU, the program has three Mosaic kernels; for a CPU none."""
    step, params, x = attention_step(False)
    text = {p: jax.export.export(jax.jit(step), platforms=[p])(params, x).mlir_module() for p in ("tpu", "cpu")}
    assert text["tpu"].count("tpu_custom_call") == 3 and "tpu_custom_call" not in text["cpu"]


def test_the_context_is_kept_with_its_log_sum():
    """Under a policy that keeps `context`, the backward pass does not run the forward kernel again."""
    step, params, x = attention_step(False)
    q, k, v = (jnp.ones((1, 128, 1, 1, 8)), jnp.ones((1, 128, 1, 8)), jnp.ones((1, 128, 1, 8)))
    softmax = Softmax(Visibility(causal=True), 1.0)

    def count(policy):
        fn = jax.checkpoint(lambda q: jnp.sum(splash_attention(softmax, q, k, v)), policy=policy)
        return str(jax.make_jaxpr(jax.grad(fn))(q)).count("= splash_attention[")

    assert count(jax.checkpoint_policies.save_only_these_names("context")) == 1
    assert count(jax.checkpoint_policies.nothing_saveable) == 2
    assert np.isfinite(jax.jit(step)(params, x)[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("interpret", [False, True])
def test_the_stated_result_types_are_those_of_the_kernels(dtype, interpret):
    """Of both passes, with values that have another number of features than keys."""
    q, k, _, sinks, _ = operands(dtype)
    v = jnp.zeros((*k.shape[:3], 2 * HEAD_DIM), dtype)

    def loss(q, k, v):
        call = splash_attention(
            Softmax(Visibility(causal=True), 0.2), q, k, v, blocks=BLOCKS, interpret=interpret, sinks=sinks
        )
        return jnp.sum(call.astype(jnp.float32))

    made = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(q, k, v)
    found = [eqn for eqn in made.jaxpr.eqns if is_operator(eqn.primitive)]
    assert len(found) == 2
    for eqn in found:
        traced = jax.eval_shape(
            eqn.params["fn"], *(jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in eqn.invars)
        )
        assert [(x.aval.shape, x.aval.dtype) for x in eqn.outvars] == [(x.shape, x.dtype) for x in traced]
