"""Merged dimensions: in which the order of elements does not matter, and how mesh axes shard them."""
