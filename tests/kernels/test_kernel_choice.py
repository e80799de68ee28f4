"""Which implementation `auto` takes, by platform and shape, and what a kernel says that cannot run."""

import warnings

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.errors import AutoshardWarning
from autoshard.kernels.planned_platform import planned_for, planned_platform
from autoshard.models.attention import attention
from autoshard.sharding.machines.device_mesh import traced_machine


def shapes(seq=2048, heads=4, kv_heads=2, head_dim=64, dtype=jnp.bfloat16):
    q = jax.ShapeDtypeStruct((2, seq, heads, head_dim), dtype)
    return q, *[jax.ShapeDtypeStruct((2, seq, kv_heads, head_dim), dtype)] * 2


def operators(*args, **options):
    """Return the names of attention's operators in the jaxpr of a call."""
    text = str(jax.make_jaxpr(lambda *x: attention(*x, causal=True, **options))(*args))
    return {name for name in ("splash_attention", "scan", "dot_product_attention_fwd") if f" {name}" in text}


def test_auto_is_the_kernel_of_the_planned_platform():
    assert planned_platform() == "cpu"
    assert operators(*shapes()) == {"scan"}
    with planned_for("tpu"):
        assert planned_platform() == "tpu"
        assert operators(*shapes()) == {"splash_attention"}
        assert operators(*shapes(512)) == set()  # plain
    assert operators(*shapes(512)) == set()


@pytest.mark.parametrize("platform, impl, own", [("tpu", "cudnn", "splash"), ("cuda", "splash", "cudnn")])
def test_the_kernel_of_another_accelerator_is_traced_as_what_runs(platform, impl, own):
    """So it is also priced as what runs."""
    message = f"'{impl}' does not run on '{platform}', whose kernel is '{own}'. The blockwise implementation runs"
    with planned_for(platform), pytest.warns(AutoshardWarning, match=message):
        assert operators(*shapes(), impl=impl) == {"scan"}


def test_a_jitted_function_is_traced_again_for_another_platform():
    fn = jax.jit(lambda *x: attention(*x, causal=True))
    texts = []
    for platform in ("cpu", "tpu", "cpu"):
        with planned_for(platform):
            texts.append("splash_attention" in str(jax.make_jaxpr(fn)(*shapes())))
    assert texts == [False, True, False]


@pytest.mark.parametrize("target, found", [("v5p:2x2x2", True), (None, False)])
def test_a_plan_takes_the_kernel_of_its_target(target, found):
    def loss(w, x):
        q = jnp.einsum("bse,ehd->bshd", x, w)
        return jnp.sum(attention(q, q, q, causal=True))

    args = jax.ShapeDtypeStruct((64, 4, 16), jnp.float32), jax.ShapeDtypeStruct((8, 1024, 64), jnp.float32)
    plan = autoshard.plan(jax.grad(loss), *args, target=target)
    assert plan.bound is not None
    assert ("splash_attention" in str(plan.bound.traced.closed)) == found


@pytest.mark.parametrize(
    "options, kind, message",
    [
        ({}, {"seq": 1100}, r"a multiple of 128 queries \(dim 1 of q\), not 1100.*blockwise|plain implementation runs"),
        ({}, {"dtype": jnp.float16}, "q, k and v in bfloat16 or float32, not float16"),
        ({"mask": jnp.ones((1, 1, 2048, 2048), bool)}, {}, "splash takes no mask array; use causal="),
    ],
)
def test_a_kernel_that_cannot_run_says_why(options, kind, message):
    args = shapes(**kind)
    with planned_for("tpu"), pytest.warns(AutoshardWarning, match=message):
        assert "splash_attention" not in operators(*args, **options)
    with pytest.raises(ValueError, match="impl 'splash' cannot run: "):
        operators(*args, impl="splash", **options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"soft_cap": 5.0}, "cudnn has no soft_cap"),
        ({"segment_ids": jnp.zeros((2, 2048), jnp.int32)}, "cudnn takes no segment_ids"),
        ({"sinks": jnp.zeros(4)}, "cudnn has no sinks"),
    ],
)
def test_cudnn_says_what_it_lacks(options, message):
    with pytest.raises(ValueError, match=message):
        operators(*shapes(), impl="cudnn", **options)
    with planned_for("cuda"), pytest.warns(AutoshardWarning, match=message):
        assert operators(*shapes(), **options) == {"scan"}


@pytest.mark.parametrize("target, most", [("a100:8", 128), ("h100:8", 256), ("h200:8", 256), ("b200:8", 256)])
@pytest.mark.parametrize("head_dim", [128, 136, 256, 264])
def test_cudnn_takes_larger_heads_from_hopper_on(target, most, head_dim):
    """Gemma has heads of 256."""
    args = shapes(head_dim=head_dim)
    with planned_for(traced_machine(None, target)):
        if head_dim <= most:
            assert "scan" not in operators(*args)
            return
        with pytest.warns(AutoshardWarning, match=f"a multiple of 8 and at most {most} on a GPU of compute capability"):
            assert operators(*args) == {"scan"}


def test_without_a_plan_a_kernel_needs_one_device_or_shard_map(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.warns(
        AutoshardWarning, match="XLA does not partition it over several devices; use autoshard.auto_shard"
    ):
        assert operators(*shapes()) == {"scan"}
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    inside = jax.shard_map(lambda *x: attention(*x, causal=True), mesh=mesh, in_specs=spec, out_specs=spec)
    args = [jax.ShapeDtypeStruct((8, *x.shape[1:]), x.dtype) for x in shapes()]
    assert "splash_attention" in str(jax.make_jaxpr(inside)(*args))


def test_other_implementations_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        operators(*shapes(1100), impl="blockwise")
