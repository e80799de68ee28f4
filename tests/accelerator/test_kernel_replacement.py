"""Attention in plain JAX is replaced by the device's kernel in a step under `auto_shard`."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard import auto_shard
from tests.accelerator.comparisons import assert_no_worse, on_cpu

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("on_gpu")]

BATCH, SEQ, HEADS, HEAD_DIM, LAYERS = 2, 1024, 4, 64, 2
WIDTH = HEADS * HEAD_DIM


def by_einsum(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / math.sqrt(HEAD_DIM)
    scores = jnp.where(jnp.tril(jnp.ones((SEQ, SEQ), bool)), scores, -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(q.dtype), v)


def without_mask(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.einsum("bqhd,bkhd->bqhk", q * HEAD_DIM**-0.5, k)
    return jnp.einsum("bqhk,bkhd->bqhd", jax.nn.softmax(scores.astype(jnp.float32), -1).astype(q.dtype), v)


def window(q: Any, k: Any, v: Any) -> Any:
    ahead = jnp.arange(SEQ)[:, None] - jnp.arange(SEQ)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * HEAD_DIM**-0.5
    scores = jnp.where((ahead >= 0) & (ahead < 70), scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(q.dtype), v)


def grouped(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k[:, :, ::2], v[:, :, ::2], is_causal=True, implementation="xla")


def step_of(attention: Any, dtype: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        y = x.astype(dtype)
        q, k, v = (jnp.einsum("bse,ehd->bshd", y, w[name].astype(dtype)) for name in ("q", "k", "v"))
        out = jnp.einsum("bshd,hde->bse", attention(q, k, v), w["out"].astype(dtype))
        return x + jnp.tanh(out.astype(jnp.float32)), None

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(lax.scan(layer, x, params)[0] ** 2)

    return jax.value_and_grad(loss, argnums=(0, 1))


def arguments() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    shapes = {name: (LAYERS, WIDTH, HEADS, HEAD_DIM) for name in ("q", "k", "v")}
    shapes["out"] = (LAYERS, HEADS, HEAD_DIM, WIDTH)
    params = {name: jnp.asarray(rng.normal(size=shape) * 0.06, jnp.float32) for name, shape in shapes.items()}
    return params, jnp.asarray(rng.normal(size=(BATCH, SEQ, WIDTH)), jnp.float32)


@pytest.mark.parametrize("attention", [by_einsum, without_mask, window, grouped])
def test_loss_and_gradients_are_as_exact_as_without_the_kernel(attention):
    args, step = arguments(), step_of(attention, jnp.bfloat16)
    planned = auto_shard(step, kernels="require")
    (record,) = planned.plan(*args).kernels
    assert record.replaced and record.kernel == "cudnn", record.reason
    assert "__cudnn$fmha" in planned.lower(*args).compile().as_text()
    assert_no_worse(planned(*args), jax.jit(step)(*args), on_cpu(step_of(attention, jnp.float32), *args))
