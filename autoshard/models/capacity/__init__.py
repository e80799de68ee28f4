"""Experts with a limited capacity: each expert processes a fixed number of slots."""

from autoshard.models.capacity.slots import SLOTS, dispatch_masks, gated_outputs, one_hot

__all__ = ["SLOTS", "dispatch_masks", "gated_outputs", "one_hot"]
