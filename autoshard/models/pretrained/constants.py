"""Sizes for reading tensors quickly."""

# Rows and columns of a block of a transposed copy. Source: copies of bfloat16 [8192, 2048] on one x86-64 core, 2026-11:
# 2.4 GB/s with blocks of 64, 3.4 with 128, 2.1 with 256, and 0.35 without blocks.
BLOCK = 128

# Bytes that the system reads ahead of the tensor that is copied. Chosen: several tensors of large models.
AHEAD_BYTES = 256 * 2**20

# Bytes from which memory is mapped in ordinary pages. Source: NumPy asks for huge pages for arrays of 4 MiB and more.
MAPPED_BYTES = 4 * 2**20

# Alignment of arrays that JAX takes without a copy on CPUs, in bytes. Source: observed with JAX 0.10.2, 2026-11.
ALIGNMENT = 64
