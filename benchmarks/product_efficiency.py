"""Measure the fraction of a TPU's peak FLOP/s that products of train steps reach, by the compiler's cycles.

    python benchmarks/product_efficiency.py                    # all rows; they are stored
    python benchmarks/product_efficiency.py v5e:2x2            # the rows of a target
    python benchmarks/product_efficiency.py --show             # the stored rows, without compiling

Each case is the gradient of two blocks. A block has a norm, products with elementwise operators between them, and a
residual sum. XLA fuses these operators into the kernels of the products, and the fused kernels are slower than the
products alone. The rows of the input are sharded over four devices. The weights are whole: in bfloat16, as after a
gather, or in float32, which the kernels round. The efficiency of a case is the time of its products at the peak,
divided by the time of their kernels in the compiled program (the joined measure of `estimate.py`). Nothing runs. The
rows are stored in `results/product_efficiency.json`.

`efficiency` of v5e in `autoshard.sharding.machines.chips` is the median of the rows with weights in bfloat16. No
published step time calibrates this chip.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import common  # sets up the path and the devices first
import jax
import jax.numpy as jnp
from judged_steps import estimated, exported
from stored_rows import run_cases, stored

from autoshard import plan
from autoshard.sharding.audit import compile_job
from autoshard.sharding.machines.targets import find_target

PATH = common.RESULTS / "product_efficiency.json"
TIMEOUT_S = 900.0  # chosen: seconds after which a compiler is stopped
DEVICES, LAYERS, SEQ = 4, 2, 1024
BLOCKS = ("gelu", "swiglu", "projections")
SIZES = ((1024, 8192), (1024, 32768), (2048, 8192), (2048, 32768), (4096, 8192))  # width, rows on a device
CASES = tuple(product(("v5e:2x2",), BLOCKS, SIZES, ("bfloat16", "float32")))


@dataclass(frozen=True)
class Row:
    """A compiled case: its target, block, width, rows on a device, the dtype of its weights, and its efficiency."""

    target: str
    block: str
    width: int
    rows: int
    weights: str
    efficiency: float

    def __str__(self) -> str:
        """`v5e:2x2 gelu, 8192 rows, width 1024, weights in bfloat16: 0.9`."""
        sizes = f"{self.rows} rows, width {self.width}"
        return f"{self.target} {self.block}, {sizes}, weights in {self.weights}: {self.efficiency:.3f}"


def shapes(block: str, width: int) -> list[tuple[int, ...]]:
    """Return the shapes of a block's weights: the norm's scale first."""
    if block == "projections":
        return [(width,), *[(width, width)] * 4]
    return [(width,), *[(width, 4 * width)] * (1 if block == "gelu" else 2), (4 * width, width)]


def layer(block: str, x: jax.Array, weights: Sequence[jax.Array]) -> jax.Array:
    """Apply a block to `[rows, seq, width]`."""
    scale, *others = (w.astype(x.dtype) for w in weights)
    wide = x.astype(jnp.float32)
    y = (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype) * scale
    if block == "gelu":
        return x + jax.nn.gelu(y @ others[0]) @ others[1]
    if block == "swiglu":
        return x + (jax.nn.silu(y @ others[0]) * (y @ others[1])) @ others[2]
    query, key, value = (y @ w for w in others[:3])
    return x + (query * key + value) @ others[3]


def gradients(block: str) -> Any:
    """Return the gradients of the mean square of the last block's result."""

    def loss(weights: Sequence[Sequence[jax.Array]], x: jax.Array) -> jax.Array:
        for each in weights:
            x = layer(block, x, each)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    return jax.grad(loss)


def compiled(target: str, block: str, size: tuple[int, int], weights: str) -> Row:
    """Compile a case."""
    width, rows = size
    arrays = [jax.ShapeDtypeStruct(shape, weights) for shape in shapes(block, width)]
    x = jax.ShapeDtypeStruct((rows // SEQ * DEVICES, SEQ, width), jnp.bfloat16)
    made = plan(gradients(block), [arrays] * LAYERS, x, target=target, plan=f"dp:{DEVICES}")
    result = compile_job(exported(made, target), TIMEOUT_S)
    assert result.kind == "ok", result.message
    step = estimated(result, target)
    kernels = [row for row in step.rows if row.what == "compute" and row.flops > 0]
    least = sum(row.flops for row in kernels) / find_target(target).chip.flops
    return Row(target, block, width, rows, weights, round(least / sum(row.seconds["joined"] for row in kernels), 4))


def case_of(row: Row) -> tuple[Any, ...]:
    """Return the case of a row."""
    return row.target, row.block, (row.width, row.rows), row.weights


def medians(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """Return the median efficiency by target and dtype of the weights."""
    keys = dict.fromkeys((row.target, row.weights) for row in rows)
    return {key: statistics.median(row.efficiency for row in rows if (row.target, row.weights) == key) for key in keys}


def main(arguments: Sequence[str]) -> None:
    """Compile the requested rows, store them, and print them with the medians of all stored rows."""
    run_cases(__doc__, arguments, PATH, Row, CASES, compiled, case_of)
    for (target, weights), median in medians(stored(PATH, Row)).items():
        print(f"{target}, weights in {weights}: median {median:.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
