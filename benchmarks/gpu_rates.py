"""Rates of an attached GPU, and those that plans count on: products, memory, and the link to the host.

Values are random: products of constant matrices draw less power and run faster, as one case shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from gpu_timing import Figure, Predictions, compiled_together, seconds_of

from autoshard.sharding.machines.constants import BANDWIDTH_REACHED, HOST_BANDWIDTH_REACHED
from autoshard.sharding.machines.targets import Target

# (rows, inner, columns): squares, and products of a transformer of width 2048 for 16,384 tokens.
SQUARES = [(n, n, n) for n in (1024, 2048, 4096, 8192, 16384)]
OTHERS = [(16384, 2048, 2048), (16384, 2048, 8192), (16384, 8192, 2048), (2048, 16384, 8192)]
KINDS = [(*shape, "bfloat16") for shape in SQUARES + OTHERS] + [(*shape, "float32") for shape in SQUARES[2:4]]
BYTES = 2**30  # of an array that is copied: many times the caches
PASSES = {"copy": 2, "sum of two arrays": 3}  # each reads or writes an array


def figures(target: Target, *, small: bool = False) -> Iterator[Figure]:
    """Measure the rates."""
    yield from _products(small)
    size = 2**20 if small else BYTES
    yield from _memory(size)
    yield from _host(size)


def predictions(target: Target) -> Predictions:
    """Return the rates that plans count on."""
    chip = target.chip
    found = {(_product(kind), "rate"): chip.reached(jnp.dtype(kind[3]).itemsize) / 1e12 for kind in KINDS}
    found |= {(f"memory: {case}", "rate"): chip.memory_bandwidth * BANDWIDTH_REACHED / 1e9 for case in PASSES}
    link = chip.host_bandwidth * HOST_BANDWIDTH_REACHED / 1e9
    return found | {(f"host link: {case}", "rate"): link for case in ("device to host", "host to device")}


def _product(kind: tuple[int, int, int, str]) -> str:
    return "product {} x {} x {} {}".format(*kind)


def _random(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> jax.Array:
    return jax.jit(lambda: jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype))()


def _products(small: bool) -> Iterator[Figure]:
    kinds = KINDS[:1] if small else KINDS
    lowered = {
        (m, k, n, dtype): jax.jit(jnp.matmul).lower(
            jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct((k, n), dtype)
        )
        for m, k, n, dtype in kinds
    }
    for kind, product in compiled_together(lowered).items():
        m, k, n, dtype = kind
        operands = [(_product(kind), _random((m, k), dtype), _random((k, n), dtype, 1))]
        if m == 8192 and dtype == "bfloat16":
            operands.append((f"{_product(kind)}, all ones", jnp.ones((m, k), dtype), jnp.ones((k, n), dtype)))
        for case, x, y in operands:
            found = seconds_of(lambda product=product, x=x, y=y: product(x, y))
            yield Figure("rates", case, "rate", "TFLOP/s", 2e-12 * m * k * n / found.median, found.spread)


def _memory(size: int) -> Iterator[Figure]:
    x = _random((size // 4,), jnp.float32)
    y = x + 1
    for (case, passes), fn in zip(PASSES.items(), (lambda x, y: x * 1.5, lambda x, y: x + y), strict=True):
        run = jax.jit(fn)
        found = seconds_of(lambda run=run: run(x, y))
        yield Figure("rates", f"memory: {case}", "rate", "GB/s", passes * x.nbytes / found.median / 1e9, found.spread)


def _host(size: int) -> Iterator[Figure]:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    away = here.with_memory_kind("pinned_host")
    on_device = jax.device_put(_random((size // 4,), jnp.float32), here)
    on_host = jax.block_until_ready(jax.device_put(on_device, away))
    for case, value, place in (("device to host", on_device, away), ("host to device", on_host, here)):
        # Each copy is waited for: XLA runs copies on several streams, so the last may end before the others.
        found = seconds_of(lambda value=value, place=place: jax.block_until_ready(jax.device_put(value, place)))
        yield Figure("rates", f"host link: {case}", "rate", "GB/s", value.nbytes / found.median / 1e9, found.spread)
