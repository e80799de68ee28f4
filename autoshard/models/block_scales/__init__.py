"""Weights that are codes and the scales of their blocks: their values, and products that do not decode them."""

from autoshard.models.block_scales.blocks import (
    ScaledCodes,
    StackedCodes,
    decoded,
    is_split,
    joined_inputs,
    split_inputs,
)
from autoshard.models.block_scales.product import block_product, scaled_product

__all__ = [
    "ScaledCodes",
    "StackedCodes",
    "block_product",
    "decoded",
    "is_split",
    "joined_inputs",
    "scaled_product",
    "split_inputs",
]
