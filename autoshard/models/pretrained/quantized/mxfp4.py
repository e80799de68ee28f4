"""Values in 4 bits with a power of two for each 32 of them (MXFP4; OCP Microscaling Formats, version 1.0, section 5).

    value[i] = code[i] * 2 ** (scale[i / 32] - 127)        code: float4_e2m1fn, two in a byte, the first in the low bits

gpt-oss stores the experts' matrices transposed: codes `[experts, outputs, blocks, 16]` and scales
`[experts, outputs, blocks]` are a tensor `[experts, inputs, outputs]`. The scale of a new block is the power of two
below its largest magnitude, over 4, the largest power of two of the type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from autoshard._shown import shown
from autoshard.ckpt.exchange.safetensors import Tensor
from autoshard.models.pretrained.layouts import Layout
from autoshard.models.pretrained.quantized.scheme import Index, Scheme
from autoshard.models.pretrained.tables import Source

CODE = ml_dtypes.float4_e2m1fn
BLOCK, BIAS, NAN_SCALE = 32, 127, 255  # of the specification
LARGEST, LARGEST_EXPONENT = np.float32(ml_dtypes.finfo(CODE).max), 2
_ONE = np.arange(16, dtype=np.uint8).view(CODE).astype(np.float32)  # the value of each code
PAIRS = np.stack([np.tile(_ONE, 16), np.repeat(_ONE, 16)], axis=1)  # the two values of each byte


@shown
@dataclass(frozen=True)
class Mxfp4(Scheme):
    """4 bits a value, and a power of two for each 32 values."""

    codes, scales = "_blocks", "_scales"
    code_dtype = scale_dtype = "uint8"
    form, kept_dtypes = "mxfp4", ("float4_e2m1fn", "float8_e8m0fnu")

    def shape(self, codes: Sequence[int]) -> tuple[int, ...] | None:
        """Return the shape of the plain tensor, `[experts, inputs, outputs]`."""
        if len(codes) != 4 or codes[3] != BLOCK // 2:
            return None
        return codes[0], codes[2] * BLOCK, codes[1]

    def scale_shape(self, codes: Sequence[int]) -> tuple[int, ...]:
        """Return `[experts, outputs, blocks]`."""
        return tuple(codes[:3])

    @staticmethod
    def fits(layout: Layout) -> bool:
        """Return whether the layout makes matrices `[experts, inputs, outputs]` of a tensor with this order."""
        groups = layout.groups
        return len(groups) == 3 and [len(one) for one in groups[:2]] == [1, 1] and layout.in_order

    def scale_source(self, source: Source) -> Source | None:
        """Return the scales `[experts, blocks, outputs]` of experts' matrices; None for other weights."""
        if not self.fits(source.layout):
            return None
        *outer, inputs, outputs = source.shape
        names = {index: name + self.scales for index, name in source.names.items()}
        return Source((*outer, inputs // BLOCK, outputs), names, source.leading, source.layout)

    def kept(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return codes `[experts, inputs, outputs]` and scales `[experts, blocks, outputs]`; see `Scheme.kept`."""
        found = {}
        for name in [name for name, one in stored.items() if self.is_codes(one)]:
            plain = self.plain_name(name)
            found[plain] = self._kept_codes(plain, stored[name])
            found[plain + self.scales] = self._kept_scales(stored[plain + self.scales])
        return {**stored, **found}

    def unkept(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return codes and scales as they are stored; see `Scheme.unkept`."""

        def undone(one: Tensor) -> Tensor:
            if one.dtype not in self.kept_dtypes:
                return one
            experts, rows, outputs = one.shape
            if one.dtype == self.kept_dtypes[1]:
                shape = experts, outputs, rows
                return Tensor(one.name, shape, self.scale_dtype, lambda: one.read().view(np.uint8).transpose(0, 2, 1))
            shape = experts, outputs, rows // BLOCK, BLOCK // 2
            return Tensor(one.name + self.codes, shape, self.code_dtype, lambda: _packed(one.read()).reshape(shape))

        return [undone(one) for one in tensors]

    def _kept_codes(self, name: str, codes: Tensor) -> Tensor:
        shape = self.shape(codes.shape)
        assert shape is not None

        def part(index: Index, empty: Callable[..., np.ndarray] = np.empty) -> np.ndarray:
            experts, inputs, outputs = _whole(index, shape)
            blocks = slice(inputs.start // BLOCK, -(-inputs.stop // BLOCK))
            found = codes.read_part((experts, outputs, blocks, slice(0, BLOCK // 2)))
            halves = np.stack([found & 15, found >> 4], axis=-1).reshape(*found.shape[:2], -1)
            start = inputs.start - blocks.start * BLOCK
            return halves[..., start : start + inputs.stop - inputs.start].transpose(0, 2, 1).view(CODE)

        return Tensor(name, shape, self.kept_dtypes[0], lambda: part((slice(None),) * 3), part, codes.file)

    def _kept_scales(self, scales: Tensor) -> Tensor:
        experts, outputs, blocks = scales.shape

        def part(index: Index, empty: Callable[..., np.ndarray] = np.empty) -> np.ndarray:
            found = scales.read_part((index[0], index[2], index[1]))
            return found.transpose(0, 2, 1).view(ml_dtypes.float8_e8m0fnu)

        shape = experts, blocks, outputs
        return Tensor(scales.name, shape, self.kept_dtypes[1], lambda: part((slice(None),) * 3), part, scales.file)

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
            stored = _values(codes[expert], scales[expert]).astype(own.dtype)
            changed = np.any((stored != own) & ~(np.isnan(stored) & np.isnan(own)), axis=-1)
            new_codes[expert][changed], new_scales[expert][changed] = _quantized(own[changed].astype(np.float32))
        return new_codes, new_scales


def _whole(index: Index, shape: Sequence[int]) -> Index:
    """Return the same ranges with explicit starts and stops."""
    return tuple(slice(*i.indices(n)[:2]) for i, n in zip(index, shape, strict=True))


def _packed(codes: np.ndarray) -> np.ndarray:
    """Pack codes `[experts, inputs, outputs]` in pairs into bytes `[experts, outputs, inputs / 2]`."""
    halves = codes.view(np.uint8).transpose(0, 2, 1) & 15
    return halves[..., 0::2] | halves[..., 1::2] << 4


def _values(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the values of blocks, float32 `[..., 32]`."""
    values = PAIRS[codes].reshape(*codes.shape[:-1], BLOCK)
    np.ldexp(values, scales.astype(np.int32)[..., None] - BIAS, out=values)
    values[scales == NAN_SCALE] = np.nan
    return values


def _quantized(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes, `[blocks, 16]`, and the scales, `[blocks]`, of values `[blocks, 32]`."""
    largest = np.max(np.abs(blocks), axis=-1)
    exponent = np.where(largest > 0, np.frexp(largest)[1] - 1 - LARGEST_EXPONENT, 0)
    scales = np.clip(exponent + BIAS, 0, 2 * BIAS).astype(np.uint8)
    scaled = np.ldexp(blocks, BIAS - scales.astype(np.int32)[..., None])
    codes = np.clip(scaled, -LARGEST, LARGEST).astype(CODE).view(np.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scales
