"""Limits of collective matmul."""

MOST_RING_DEVICES = 16  # devices of a ring: a product runs in as many parts, each written out; chosen for compile time
