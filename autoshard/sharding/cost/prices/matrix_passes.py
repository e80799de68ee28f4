"""How often a TPU's matrix unit multiplies for one product at a higher precision, and for a Fourier transform.

A TPU multiplies 32-bit floats as bfloat16. For a higher precision, it splits operands into bfloat16 parts, and
multiplies these: 3 products for `Precision.HIGH`, 6 for `HIGHEST`.

XLA:TPU computes a Fourier transform as a product with a matrix of roots of unity, at the highest precision. For N
elements the matrix has N rows. If N is a power of two above 256, there are two products instead, with matrices of A and
B rows, N = A x B. The values between the two products are stored. Each complex product is three real ones.

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
from autoshard.sharding.machines.constants import PRECISION_PASSES
from autoshard.sharding.program.array_sizes import itemsize
from autoshard.sharding.program.operator_kinds import CONTRACTIONS
from autoshard.spmdrules.ir.program import Op

# A transform along a power of two is one product up to this many elements. Source: programs compiled for v5e (above).
_WHOLE = 256
# Beyond that, the larger of the two matrices has at least this many rows. Source: as above.
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
    """Return the passes of a TPU's matrix unit for one product: 1 at default precision, 6 at the highest."""
    if op.name not in CONTRACTIONS or any(v.aval.dtype != jnp.float32 for v in op.eqn.invars[:2]):
        return 1
    precision = op.eqn.params.get("precision")
    is_pair = isinstance(precision, tuple) and not isinstance(precision, lax.DotAlgorithm)  # which is a tuple, too
    return max(map(_passes_of, precision if is_pair else (precision,)))


def _passes_of(precision: Any) -> int:
    """The passes of a `Precision`, a `DotAlgorithm`, or a `DotAlgorithmPreset` such as `BF16_BF16_F32_X3`."""
    if isinstance(precision, lax.DotAlgorithm):
        return precision.num_primitive_operations
    if isinstance(precision, lax.DotAlgorithmPreset):
        parts = precision.name.rpartition("_X")[2]
        exact = precision is lax.DotAlgorithmPreset.F32_F32_F32
        return PRECISION_PASSES["highest"] if exact else int(parts) if parts.isdigit() else 1
    return 1 if precision is None else PRECISION_PASSES.get(precision.name.lower(), 1)


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
    flops = PRECISION_PASSES["highest"] * operations * elements
    return FourierWork(float(flops), float(elements * exchanges * _EXCHANGED * part))


def _sides(n: int) -> tuple[int, ...]:
    """Return the number of rows of each matrix in a transform along `n` elements: `(n,)`, or `(a, b)` for n = a x b."""
    if n <= _WHOLE or n & (n - 1):
        return (n,)
    side = max(_LEAST_SIDE, 1 << math.ceil(math.log2(n) / 2))
    return side, n // side
