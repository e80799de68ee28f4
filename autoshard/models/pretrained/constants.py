"""Sizes for reading tensors quickly."""

# Rows and columns of a block of a transposed copy. Source: copies of bfloat16 [8192, 2048] on one x86-64 core, 2026-11:
# 2.4 GB/s with blocks of 64, 3.4 with 128, 2.1 with 256, and 0.35 without blocks.
BLOCK = 128

# Bytes of a piece of a tensor, which one thread reads and then copies. The pieces of all threads must stay in the
# processor's cache. Source: `benchmarks/pretrained.py --undisturbed` with other values here. An import took 0.95
# seconds with two threads and pieces of 8 MiB, and 0.96 with 4 MiB (means of three in turn; two x86-64 cores with
# 32 MiB of L3 cache, 2026-11).
PIECE_BYTES = 8 * 2**20

# The most threads that read and copy pieces; fewer on machines with fewer cores. Each takes the memory of a piece.
# Source: on two cores, the same imports took 1.10 seconds with four threads. The limit for other machines is chosen.
MOST_THREADS = 4

# Bytes from which memory is mapped in ordinary pages. Source: NumPy asks for huge pages for arrays of 4 MiB and more.
MAPPED_BYTES = 4 * 2**20

# Alignment of arrays that JAX takes without a copy on CPUs, in bytes. Source: observed with JAX 0.10.2, 2026-11.
ALIGNMENT = 64
