"""Merged dimensions: whether the order of their elements matters, and how mesh axes shard them."""
