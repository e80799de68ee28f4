"""Experts without a capacity limit: each expert processes the rows of all tokens that chose it."""

from autoshard.models.dropless.coded import (
    experts_in_codes,
    limited_experts_in_codes,
    same_blocks,
    scale_of_each_output,
)
from autoshard.models.dropless.operators import experts, limited_experts

__all__ = [
    "experts",
    "experts_in_codes",
    "limited_experts",
    "limited_experts_in_codes",
    "same_blocks",
    "scale_of_each_output",
]
