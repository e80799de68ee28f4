"""Check the TPU compiler's estimated cycles on kernels that are bound by memory.

    python benchmarks/compiler_cycles.py

Each program is one elementwise kernel on 512 MiB or 1 GiB a device. Its bandwidth is the bytes that it reads and writes
over the seconds of the compiler's cycles, shown relative to the chip's bandwidth. A kernel that does more work on the
same bytes cannot be faster, and a kernel on half the bytes cannot take as long. Where the figures claim that, the
cycles do not measure memory-bound work, and agreement with them proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import common  # sets up the devices first
import jax
import jax.numpy as jnp

import autoshard
from autoshard.sharding.machines.targets import find_target

TARGETS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")
SHAPE, DEVICES = (16384 * 16, 4096), 4

_BF16, _F32 = (jax.ShapeDtypeStruct(SHAPE, dtype) for dtype in ("bfloat16", "float32"))
_KERNELS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "-x, bfloat16": (jnp.negative, (_BF16,)),
    "-x, float32": (jnp.negative, (_F32,)),
    "gelu(x), bfloat16": (jax.nn.gelu, (_BF16,)),
    "x + y, bfloat16": (jnp.add, (_BF16, _BF16)),
    "x + y, float32": (jnp.add, (_F32, _F32)),
    "silu(x) * y, bfloat16": (lambda x, y: jax.nn.silu(x) * y, (_BF16, _BF16)),
    "x * y * z, bfloat16": (lambda x, y, z: x * y * z, (_BF16, _BF16, _BF16)),
}


def bandwidth(target: str, kernel: Callable[..., Any], operands: tuple[Any, ...]) -> float:
    """Return the bandwidth by the compiler's cycles, relative to the chip's."""
    plan = autoshard.plan(kernel, *operands, target=target, plan=f"dp:{DEVICES}")
    seconds = (plan.verify().step_time_us or float("nan")) / 1e6
    result = jax.eval_shape(kernel, *operands)
    moved = sum(each.size * each.dtype.itemsize for each in (*operands, result)) / DEVICES
    return moved / seconds / find_target(target).chip.memory_bandwidth


def main() -> None:
    """Compile and report."""
    rows = [
        common.Row(f"{target}: {name}", bandwidth(target, kernel, operands), "of the chip's bandwidth")
        for target in TARGETS
        for name, (kernel, operands) in _KERNELS.items()
    ]
    common.report("compiler_cycles", rows)


if __name__ == "__main__":
    main()
