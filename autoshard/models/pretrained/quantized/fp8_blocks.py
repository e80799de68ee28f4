r"""Values in 8 bits with a scale for each block of a matrix (DeepSeek-V3, arXiv:2412.19437, section 3.3).

    value[r, c] = code[r, c] * scale[r / rows, c / columns]        code: float8_e4m3fn, scale: float32

Blocks at the right and lower edge may be smaller. The scale of a new block is its largest magnitude over 448, the
largest number of the type; with `powers`, the next power of two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from autoshard._shown import shown
from autoshard.ckpt.exchange.safetensors import Tensor
from autoshard.models.pretrained.layouts import PART, Layout
from autoshard.models.pretrained.quantized.scheme import Index, Scheme
from autoshard.models.pretrained.tables import Source

CODE = ml_dtypes.float8_e4m3fn
LARGEST = np.float32(ml_dtypes.finfo(CODE).max)
VALUES = np.arange(256, dtype=np.uint8).view(CODE).astype(np.float32)  # of each code


@shown
@dataclass(frozen=True)
class Fp8Blocks(Scheme):
    """8 bits a value, and scales of blocks.

    Attributes:
        rows: number of rows of a block.
        columns: number of columns of a block.
        powers: whether new scales are powers of two.
    """

    rows: int = 128
    columns: int = 128
    powers: bool = False

    codes, scales = "", "_scale_inv"
    code_dtype, scale_dtype = "float8_e4m3fn", "float32"
    form, kept_dtypes = "fp8", ("float8_e4m3fn", "float32")

    def shape(self, codes: Sequence[int]) -> tuple[int, ...] | None:
        """Return the shape of the plain tensor: that of the codes, of two dimensions."""
        return tuple(codes) if len(codes) == 2 else None

    def scale_shape(self, codes: Sequence[int]) -> tuple[int, ...]:
        """Return the number of blocks in each dimension."""
        return -(-codes[0] // self.rows), -(-codes[1] // self.columns)

    @staticmethod
    def fits(layout: Layout) -> bool:
        """Return whether the layout is that of a matrix."""
        return is_matrix(layout)

    def scale_source(self, source: Source) -> Source | None:
        """Return the scales of a matrix whose blocks are ranges of each dimension; None for other weights."""
        shape, block = source.shape[source.leading :], (self.rows, self.columns)
        counts = block_counts(source.layout, shape, block) if self.fits(source.layout) else None
        if counts is None:
            return None
        names = {index: name + self.scales for index, name in source.names.items()}
        return Source((*source.shape[: source.leading], *counts), names, source.leading, source.layout)

    def decode(self, codes: Tensor, scales: Tensor, index: Index) -> np.ndarray:
        """Return a range of the plain tensor, float32 `[rows, columns]`."""
        rows, columns = index
        values = VALUES[codes.read_part(index).view(np.uint8)]
        blocks = slice(rows.start // self.rows, -(-rows.stop // self.rows))
        of_blocks = scales.read_part((blocks, slice(columns.start // self.columns, -(-columns.stop // self.columns))))
        column = np.arange(columns.start, columns.stop) // self.columns - columns.start // self.columns
        for number, own in enumerate(of_blocks, blocks.start):
            first, last = max(number * self.rows, rows.start), min((number + 1) * self.rows, rows.stop)
            values[first - rows.start : last - rows.start] *= own[column]
        return values

    def encode(self, values: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return codes `[rows, columns]` and scales of blocks; see `Scheme.encode`."""
        new_codes, new_scales = np.empty_like(codes), scales.copy()
        starts = np.arange(0, values.shape[1], self.columns)
        column = np.arange(values.shape[1]) // self.columns
        for number in range(scales.shape[0]):
            here = slice(number * self.rows, (number + 1) * self.rows)
            own, wide = values[here], values[here].astype(np.float32)
            kept = (VALUES[codes[here].view(np.uint8)] * scales[number][column]).astype(own.dtype)
            # The same bits, or numbers that are not: both are then left as they are.
            changed = np.add.reduceat(np.any((kept != own) & ~(np.isnan(kept) & np.isnan(own)), axis=0), starts) > 0
            largest = np.maximum.reduceat(np.max(np.abs(wide), axis=0), starts)
            new_scales[number] = np.where(changed, self._scale(largest), scales[number])
            quantized = np.clip(wide / new_scales[number][column], -LARGEST, LARGEST).astype(CODE)
            new_codes[here] = np.where(changed[column], quantized, codes[here])
        return new_codes, new_scales

    def _scale(self, largest: np.ndarray) -> np.ndarray:
        scale = np.where(largest > 0, largest / LARGEST, np.float32(1))
        return np.exp2(np.ceil(np.log2(scale))).astype(np.float32) if self.powers else scale.astype(np.float32)


def block_counts(layout: Layout, shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...] | None:
    """Return the number of blocks in each dimension of a weight; None if blocks are not ranges of its dimensions.

    Args:
        layout: how the tensor becomes the weight.
        shape: the shape of the weight.
        block: the number of rows and of columns of a block of the tensor.

    >>> block_counts(Layout("(h d) e -> e h d"), (512, 8, 64), (128, 128))
    (4, 4, 1)
    >>> block_counts(Layout("(h d) e -> e h d"), (512, 8, 192), (128, 128)) is None
    True
    """
    sizes, counts = dict(zip(layout.names, shape, strict=True)), {}
    for group, length in zip(layout.groups, block, strict=True):
        rest = min(length, math.prod(sizes[name] for name in group))
        for name in reversed(group):
            size = sizes[name]
            if max(rest, size) % min(rest, size):
                return None
            counts[name] = size // min(rest, size)
            rest = max(rest // size, 1)
    return tuple(counts[name] for name in layout.names)


def is_matrix(layout: Layout) -> bool:
    """Return whether a layout makes a matrix `[*inputs, *outputs]` of one tensor `[outputs, inputs]`."""
    groups = layout.groups
    return len(groups) == 2 and PART not in groups[0] + groups[1] and layout.names == groups[1] + groups[0]
