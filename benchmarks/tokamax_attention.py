"""Attention on a TPU by tokamax beside JAX's splash kernel, which the planner takes: compiled, nothing runs.

    pip install tokamax            # Python 3.12 or newer; it needs JAX 0.11.1
    python benchmarks/tokamax_attention.py [v5p:2x2x1]

For each shape, the causal forward pass and all gradients are compiled for one device of the target. The table has the
temporaries of the program, and the compiler's cycles of all operators around the kernels, as time: layouts, sums, and
what a library does outside of its kernels. The kernels themselves have no cycles.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from common import Console, Table
from estimate import CHIPS
from jax.experimental import topologies

from autoshard.models.attention import attention

# Batch, positions, query heads, key heads, size of a head.
SHAPES = ((8, 2048, 8, 8, 128), (2, 8192, 8, 8, 128), (1, 32768, 32, 8, 128))
UNKNOWN_CYCLES = 2**62  # what the compiler writes where it has no estimate is larger


def by_splash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention by JAX's kernel."""
    return attention(q, k, v, causal=True, impl="splash")


def by_tokamax(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention by tokamax's kernel for TPUs."""
    import tokamax  # pyright: ignore[reportMissingImports]  not a dependency

    return tokamax.dot_product_attention(q, k, v, is_causal=True, implementation="mosaic")


def without_devices() -> contextlib.AbstractContextManager[Any]:
    """Let tokamax trace for a TPU that is not attached. Its gradients are traced outside of its call."""
    from tokamax import config  # pyright: ignore[reportMissingImports]  not a dependency

    return config.cross_compile(True)


KERNELS: Mapping[str, tuple[Callable[..., jax.Array], Callable[[], contextlib.AbstractContextManager[Any]]]] = {
    "JAX's splash": (by_splash, contextlib.nullcontext),
    "tokamax": (by_tokamax, without_devices),
}


def compiled(kernel: str, target: str, shape: tuple[int, ...]) -> tuple[str, str]:
    """Compile the gradients; return MiB of temporaries and ms around the kernels, or why there are none."""
    batch, seq, heads, kv_heads, size = shape
    device = topologies.get_topology_desc(target, platform="tpu").devices[0]
    on_device = jax.sharding.SingleDeviceSharding(device)
    q, k, v = (
        jax.ShapeDtypeStruct((batch, seq, count, size), jnp.bfloat16, sharding=on_device)
        for count in (heads, kv_heads, kv_heads)
    )
    fn, context = KERNELS[kernel]
    gradients: Any = jax.grad(lambda *x: fn(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2))
    try:
        with context():
            made = jax.jit(gradients).lower(q, k, v).compile()
    except jax.errors.JaxRuntimeError as error:
        return "does not fit" if "RESOURCE_EXHAUSTED" in str(error) else "refused", "-"
    text = made.as_text() or ""
    found = [int(each) for each in re.findall(r'"estimated_cycles":"?(\d+)', text[text.index("ENTRY") :])]
    cycles = sum(each for each in found if each < UNKNOWN_CYCLES)
    memory: Any = made.memory_analysis()
    return f"{memory.temp_size_in_bytes / 2**20:.0f}", f"{cycles / CHIPS[target.partition(':')[0]].clock * 1e3:.2f}"


def main(target: str = "v5p:2x2x1") -> None:
    """Compile and print."""
    table = Table("batch x positions x heads / key heads", "kernel", "temporaries MiB", "around the kernels ms")
    for shape in SHAPES:
        for name in KERNELS:
            batch, seq, heads, kv_heads, _ = shape
            table.add_row(f"{batch} x {seq} x {heads} / {kv_heads}", name, *compiled(name, target, shape))
    Console(width=120).print(table)


if __name__ == "__main__":
    main(*sys.argv[1:])
