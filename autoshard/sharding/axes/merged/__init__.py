"""Finds merged dimensions in which the order of elements does not matter. Each device can then merge its own rows."""
