"""Work of a TPU's matrix unit that does not follow from the sizes of a product: precision, and Fourier transforms.

A TPU multiplies 32-bit floats as bfloat16. For a higher precision, it splits operands into bfloat16 parts, and
multiplies these: 3 products for `Precision.HIGH`, 6 for `HIGHEST`.

A Fourier transform is products with matrices of roots of unity, at the highest precision. Along N elements, the
matrices have N rows. If N is a power of two above 256, there are two smaller products, with matrices of A and B rows
for N = A x B. The values between them are stored. Each complex product is three real ones.

Compiled for v5e (libtpu 0.0.42.1) along 128 to 65536 elements, this gives the compiler's operations within 5 % if N is
a power of two. For other N, the compiler counts 2 N to 12 N operations for each element, and this function 4 N or 6 N.
Of 20 single transforms (`benchmarks/transforms.py`), the estimated time is 0.7 to 1.4 times the referee's. Without
this, it was 0.02 to 0.2 times.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from autoshard._shown import shown
from autoshard.sharding.program.array_sizes import itemsize
from autoshard.sharding.program.operator_kinds import CONTRACTIONS
from autoshard.spmdrules.ir.program import Op

# Products of bfloat16 parts for one product of 32-bit floats. Source: JAX's documentation of `Precision`.
_PASSES = {lax.Precision.HIGH: 3, lax.Precision.HIGHEST: 6}
# Largest matrix of roots of unity in which a transform along a power of two is one product. Source: programs compiled
# for v5e (see above).
_WHOLE = 256
_LEAST_SIDE = 128
# Operations per element and row of a matrix: three real products for one complex product. Source: as above.
_OPERATIONS = 6
_REAL_OPERATIONS = 4  # of a single product with real operands: two real products
# 32-bit values per element that two products of one transform exchange through memory, written and read. Source: the
# compiled transforms above move 3 to 9.
_EXCHANGED = 6


@shown
class FourierWork(NamedTuple):
    """The work of a Fourier transform on a TPU, on whole operands.

    Attributes:
        flops: floating-point operations at 16 bits.
        moved_bytes: bytes that its products exchange through memory.
    """

    flops: float
    moved_bytes: float


def precision_passes(op: Op) -> int:
    """Return how many products of 16-bit parts a TPU computes for one product of an operator: 1, 3 or 6."""
    if op.name not in CONTRACTIONS or any(v.aval.dtype != jnp.float32 for v in op.eqn.invars[:2]):
        return 1
    precision = op.eqn.params.get("precision")
    return max(map(_passes_of, precision if isinstance(precision, tuple) else (precision,)))


def _passes_of(precision: Any) -> int:
    """The passes of a `Precision`, or of a `DotAlgorithmPreset` such as `BF16_BF16_F32_X3`."""
    if isinstance(precision, lax.DotAlgorithmPreset):
        parts = precision.name.rpartition("_X")[2]
        exact = precision is lax.DotAlgorithmPreset.F32_F32_F32
        return _PASSES[lax.Precision.HIGHEST] if exact else int(parts) if parts.isdigit() else 1
    return _PASSES.get(precision, 1)


def fourier_work(op: Op) -> FourierWork | None:
    """Return the work of a Fourier transform on a TPU; None for other operators."""
    if op.name != "fft":
        return None
    lengths = op.eqn.params["fft_lengths"]
    batch = op.eqn.invars[0].aval.shape[: -len(lengths)]
    elements = math.prod(batch) * math.prod(lengths)
    operations, exchanges = 0, 0
    for n in lengths:
        sides = _sides(n)
        is_real = len(lengths) == len(sides) == 1 and op.eqn.params["fft_type"] == lax.FftType.RFFT
        operations += (_REAL_OPERATIONS if is_real else _OPERATIONS) * sum(sides)
        exchanges += len(sides) - 1
    source = op.eqn.invars[0].aval
    part = itemsize(source) // (2 if jnp.issubdtype(source.dtype, jnp.complexfloating) else 1)
    flops = _PASSES[lax.Precision.HIGHEST] * operations * elements
    return FourierWork(float(flops), float(elements * exchanges * _EXCHANGED * part))


def _sides(n: int) -> tuple[int, ...]:
    """The sizes of the matrices in a transform along `n` elements."""
    if n <= _WHOLE or n & (n - 1):
        return (n,)
    side = max(_LEAST_SIDE, 1 << math.ceil(math.log2(n) / 2))
    return side, n // side
