"""Experts without a capacity limit: each expert processes the rows of all tokens that chose it."""

from autoshard.models.dropless.operators import experts, experts_in_codes, limited_experts, same_blocks

__all__ = ["experts", "experts_in_codes", "limited_experts", "same_blocks"]
