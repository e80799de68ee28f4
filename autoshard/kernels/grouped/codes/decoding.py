"""Values of 4-bit codes (float4_e2m1fn) and of the scales of 32 codes, inside a kernel on a TPU.

A TPU packs the codes of 8 consecutive rows into a 32-bit word, the first row in the low bits. An operation on a word
works on all of its codes. Each code becomes a byte of another type, float8_e4m3b11fnuz, which has the same fields with
more bits: sign, exponent and fraction. The chip converts these bytes to float32.

    code    s e e f               value of the code = 2 ** 10 * value of the byte
    byte    s 0 0 e e f 0 0       the exponents of the two types have the biases 1 and 11

Codes of even rows are in the low halves of the bytes of a word, and those of odd rows in the high halves. The
conversion to bfloat16 puts them next to each other, because a TPU packs two consecutive rows into a 32-bit word.

Source: OCP Microscaling Formats, version 1.0, section 5.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu

BLOCK = 32
"""Codes of a scale, along the first dimension of a matrix. Source: as above."""

SCALE_BIAS, NAN_SCALE, EXPONENT_SHIFT = 127, 255, 10
"""The exponent of a scale byte b is `b - SCALE_BIAS`. `EXPONENT_SHIFT` is the difference of the biases above."""

# The fields of four bytes of a word: signs, exponents with fractions, and the number that carries into a byte's sign if
# its other bits are not all zero.
_SIGNS, _MAGNITUDES, _CARRY = 0x80808080, 0x1C1C1C1C, 0x7F7F7F7F


def decoded_tile(codes: Any, scale: Any, *, interpret: bool = False) -> Any:
    """Return the values of a tile of codes, `[k, n]` in bfloat16. They are exact.

    The byte 255 of a scale stands for NaN. Bytes from 245 on, scales of at least 2 ** 118, give NaN, too.

    Args:
        codes: float4_e2m1fn `[k, n]`; 32 divides k.
        scale: the bytes of the scales, uint8 `[k / 32, n]`.
        interpret: whether Pallas interprets the kernel.
    """
    factors = scale_factors(scale)[:, None]
    rows, columns = codes.shape
    words = tpu.bitcast(codes, jnp.uint32)
    low, high = words << 2, words >> 2
    halves = (_bytes(low & _MAGNITUDES, words << 4), _bytes(high & _MAGNITUDES, words))
    even, odd = (
        (half.astype(jnp.float32).reshape(rows // BLOCK, BLOCK // 2, columns) * factors).reshape(rows // 2, columns)
        for half in halves
    )
    if interpret:
        return jnp.stack([even, odd], axis=1).reshape(rows, columns).astype(jnp.bfloat16)
    return tpu.bitcast(tpu.pack_elementwise([even, odd], packed_dtype=jnp.bfloat16), jnp.bfloat16)


def scale_factors(scale: Any) -> Any:
    """Return `2 ** EXPONENT_SHIFT` times the scales in float32, from their bytes; NaN for bytes from 245 on.

    >>> scale_factors(jnp.array([0, 127, 244, 245, 255], jnp.uint8)).tolist()
    [6.018531076210112e-36, 1024.0, 1.7014118346046923e+38, nan, nan]
    """
    exponent = (scale.astype(jnp.int32) & 0xFF) + EXPONENT_SHIFT
    value = lax.bitcast_convert_type(exponent << 23, jnp.float32)
    return jnp.where(exponent < NAN_SCALE, value, jnp.nan)


def _bytes(magnitudes: Any, signs: Any) -> jax.Array:
    """Return words of codes as bytes of float8_e4m3b11fnuz. Minus zero becomes zero, because the type has none."""
    kept = signs & (magnitudes + jnp.uint32(_CARRY)) & jnp.uint32(_SIGNS)
    return tpu.bitcast(magnitudes | kept, jnp.float8_e4m3b11fnuz)
