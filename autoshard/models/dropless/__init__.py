"""Experts without a capacity limit: each expert processes the rows of all tokens that chose it."""

from autoshard.models.dropless.operators import experts, limited_experts

__all__ = ["experts", "limited_experts"]
