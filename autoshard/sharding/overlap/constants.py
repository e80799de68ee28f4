"""Limits of collective matmul, and of the report by module."""

MOST_RING_DEVICES = 16  # devices of a ring: a product runs in as many parts, each written out; chosen for compile time
# MiB of a product from which XLA makes a collective matmul of it. A threshold this large turns that off. Source: XLA's
# default for GPUs, `xla_gpu_threshold_for_windowed_einsum_mib`.
NO_PRODUCT_MIB = 100_000
SHOWN_MODULES = 16  # lines of the report; chosen
