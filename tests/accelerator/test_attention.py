"""Attention on the device: the kernel that `auto` takes there, and what runs instead of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.errors import AutoshardWarning
from autoshard.models.attention import attention
from tests.accelerator.comparisons import assert_no_worse, on_cpu

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("on_gpu")]

SEQ, HEADS, HEAD_DIM = 1024, 4, 64
KERNEL = "__cudnn$fmha"  # the name of the call in XLA's program


def operands(dtype: Any, *, seq=SEQ, keys=None, kv_heads=HEADS, head_dim=HEAD_DIM) -> list[jax.Array]:
    """Queries, keys, values, and the cotangent of the result."""
    rng = np.random.default_rng(0)
    keys = keys or seq
    shapes = [(seq, HEADS), (keys, kv_heads), (keys, kv_heads), (seq, HEADS)]
    return [jnp.asarray(rng.normal(size=(2, length, heads, head_dim)), dtype) for length, heads in shapes]


def with_gradients(**options: Any) -> Callable[..., Any]:
    """The function from operands to attention's result and its three gradients."""

    def run(q: Any, k: Any, v: Any, cotangent: Any) -> Any:
        out, pullback = jax.vjp(lambda *x: attention(*x, **options), q, k, v)
        return out, *pullback(cotangent)

    return run


def check(args: list[jax.Array], **options: Any) -> str:
    """Compares the implementation that `auto` takes with plain attention; returns its compiled program."""
    compiled = jax.jit(with_gradients(**options)).lower(*args).compile()
    plain = jax.jit(with_gradients(**options, impl="plain"))(*args)
    expected = on_cpu(with_gradients(**options, impl="plain"), *(x.astype(jnp.float32) for x in args))
    assert_no_worse(compiled(*args), plain, expected)
    return str(compiled.as_text())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"causal": False}, {}),
        ({"causal": True}, {}),
        ({"causal": True, "scale": 0.3}, {"head_dim": 128}),
        ({"causal": True, "window": 100}, {}),
        ({"causal": True}, {"kv_heads": 2}),
        ({"causal": True}, {"kv_heads": 1, "head_dim": 72}),
        ({"causal": False}, {"seq": 512, "keys": 1152, "kv_heads": 2}),
        ({"causal": True}, {"seq": 1026}),
    ],
    ids=["full", "causal", "scale", "window", "grouped", "one key head", "more keys than queries", "odd multiple of 2"],
)
def test_the_kernel_is_as_exact_as_plain_attention(options, sizes, dtype):
    args = operands(dtype, **sizes)
    assert check(args, **options).count(KERNEL) >= 2  # forward and backward


@pytest.mark.parametrize(
    ("options", "sizes", "reason"),
    [
        ({"causal": True, "soft_cap": 5.0}, {}, "no soft_cap"),
        ({"causal": True, "segment_ids": np.repeat([[0, 1]], SEQ // 2, 1).repeat(2, 0)}, {}, "no segment_ids"),
        ({"causal": True, "sinks": np.linspace(-1, 1, HEADS, dtype=np.float32)}, {}, "no sinks"),
        ({"causal": False, "window": 100}, {}, "a window with causal=True only"),
        ({"causal": False, "mask": np.arange(SEQ)[None, None, None] < 900}, {}, "no mask array"),
        ({"causal": True}, {"seq": 1025}, "an even number of queries and keys, not 1025"),
        ({"causal": True}, {"head_dim": 136}, "at most 128, not 136"),
    ],
    ids=["soft cap", "segments", "sinks", "window of a full mask", "padding", "odd", "wide heads"],
)
def test_what_the_kernel_refuses_is_named_and_computed_without_it(options, sizes, reason):
    args = operands(jnp.bfloat16, **sizes)
    with pytest.warns(AutoshardWarning, match=f"the kernel 'cudnn' cannot run: .*{reason}"):
        assert KERNEL not in check(args, **options)


def test_float32_runs_without_the_kernel():
    args = operands(jnp.float32)
    with pytest.warns(AutoshardWarning, match="bfloat16 or float16, not float32"):
        program = jax.jit(with_gradients(causal=True)).lower(*args).compile().as_text()
    assert KERNEL not in str(program)
