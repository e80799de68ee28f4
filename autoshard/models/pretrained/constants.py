"""Sizes for reading tensors quickly."""

# Rows and columns of the square blocks in which a transposed tensor is copied. Source: a copy of bfloat16 [8192, 2048]
# on one x86-64 core ran at 2.4 GB/s with blocks of 64, 3.4 with 128, 2.1 with 256, and 0.35 without blocks (2026-11).
BLOCK = 128

# Bytes of a piece of a tensor. A thread reads one piece and then copies it, so the pieces of all threads must fit in
# the processor's cache. Source: `benchmarks/pretrained.py --undisturbed`, run with several values of this constant. An
# import by two threads took 0.95 seconds with 8 MiB and 0.96 seconds with 4 MiB (means of three alternating runs on two
# x86-64 cores with 32 MiB of L3 cache, 2026-11).
PIECE_BYTES = 8 * 2**20

# Largest number of threads that read and copy pieces; a machine with fewer cores uses one thread per core. Each thread
# needs memory for one piece. Source: chosen for machines with more cores. On two cores, more threads than cores are
# slower: the import above took 1.10 seconds with four threads.
MOST_THREADS = 4

# Arrays of at least this many bytes are mapped in ordinary pages. Source: from this size on, NumPy asks for huge pages.
MAPPED_BYTES = 4 * 2**20

# Alignment in bytes that an array needs so that JAX uses it on CPUs without a copy. Source: observed with JAX 0.10.2,
# 2026-11.
ALIGNMENT = 64
