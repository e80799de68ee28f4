"""Values in 4 bits with a power of two for each 32 of them (MXFP4; OCP Microscaling Formats, version 1.0, section 5).

    value[i] = code[i] * 2 ** (scale[i / 32] - 127)        code: float4_e2m1fn, two in a byte, the first in the low bits

gpt-oss stores the experts' matrices transposed: codes `[experts, outputs, blocks, 16]` and scales
`[experts, outputs, blocks]` are a tensor `[experts, inputs, outputs]`. The scale of a new block is the power of two
below its largest magnitude, over 4, the largest power of two of the type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from autoshard._shown import shown
from autoshard.ckpt.exchange.safetensors import Tensor
from autoshard.models.pretrained.quantized.scheme import Index, Scheme

CODE = ml_dtypes.float4_e2m1fn
BLOCK, BIAS = 32, 127  # of the specification
LARGEST, LARGEST_EXPONENT = np.float32(ml_dtypes.finfo(CODE).max), 2
_ONE = np.arange(16, dtype=np.uint8).view(CODE).astype(np.float32)  # the value of each code
PAIRS = np.stack([np.tile(_ONE, 16), np.repeat(_ONE, 16)], axis=1)  # the two values of each byte


@shown
@dataclass(frozen=True)
class Mxfp4(Scheme):
    """4 bits a value, and a power of two for each 32 values."""

    codes, scales = "_blocks", "_scales"
    code_dtype = scale_dtype = "uint8"

    def shape(self, codes: Sequence[int]) -> tuple[int, ...] | None:
        """Return the shape of the plain tensor, `[experts, inputs, outputs]`."""
        if len(codes) != 4 or codes[3] != BLOCK // 2:
            return None
        return codes[0], codes[2] * BLOCK, codes[1]

    def scale_shape(self, codes: Sequence[int]) -> tuple[int, ...]:
        """Return `[experts, outputs, blocks]`."""
        return tuple(codes[:3])

    def decode(self, codes: Tensor, scales: Tensor, index: Index) -> np.ndarray:
        """Return a range of the plain tensor, float32 `[experts, inputs, outputs]`."""
        experts, inputs, outputs = index
        blocks = slice(inputs.start // BLOCK, -(-inputs.stop // BLOCK))
        where = (experts, outputs, blocks)
        values = _values(codes.read_part((*where, slice(0, BLOCK // 2))), scales.read_part(where))
        start = inputs.start - blocks.start * BLOCK
        rows = values.reshape(*values.shape[:2], -1)[..., start : start + inputs.stop - inputs.start]
        return rows.transpose(0, 2, 1)

    def encode(self, values: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return codes `[experts, outputs, blocks, 16]` and scales of blocks; see `Scheme.encode`."""
        new_codes, new_scales = codes.copy(), scales.copy()
        for expert, matrix in enumerate(values):
            own = matrix.T.reshape(*scales.shape[1:], BLOCK)
            changed = np.any(_values(codes[expert], scales[expert]).astype(own.dtype) != own, axis=-1)
            new_codes[expert][changed], new_scales[expert][changed] = _quantized(own[changed].astype(np.float32))
        return new_codes, new_scales


def _values(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the values of blocks, float32 `[..., 32]`."""
    values = PAIRS[codes].reshape(*codes.shape[:-1], BLOCK)
    return np.ldexp(values, scales.astype(np.int32)[..., None] - BIAS, out=values)


def _quantized(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes, `[blocks, 16]`, and the scales, `[blocks]`, of values `[blocks, 32]`."""
    largest = np.max(np.abs(blocks), axis=-1)
    exponent = np.where(largest > 0, np.frexp(largest)[1] - 1 - LARGEST_EXPONENT, 0)
    scales = np.clip(exponent + BIAS, 0, 2 * BIAS).astype(np.uint8)
    scaled = np.ldexp(blocks, BIAS - scales.astype(np.int32)[..., None])
    codes = np.clip(scaled, -LARGEST, LARGEST).astype(CODE).view(np.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scales
