"""Sizes for reading tensors quickly."""

# Rows and columns of a block of a transposed copy. Source: copies of bfloat16 [8192, 2048] on one x86-64 core, 2026-11:
# 2.4 GB/s with blocks of 64, 3.4 with 128, 2.1 with 256, and 0.35 without blocks.
BLOCK = 128

# Bytes of a piece of a tensor, which one thread reads and then copies. The pieces of all threads must stay in the
# processor's cache. Source: an import of 1.07 GB from the page cache took 0.99 seconds of processor time with pieces of
# 1 MiB, 0.96 with 4 MiB and 0.92 with 16 MiB (x86-64 with 32 MiB of L3 cache, 2026-11).
PIECE_BYTES = 4 * 2**20

# Threads that read and copy pieces. Each takes the memory of a piece. Chosen: plain reads of 4 MiB by 1, 2 and 4
# threads all reached the rate of the disk at hand; faster disks serve several requests at a time.
THREADS = 4

# Bytes from which memory is mapped in ordinary pages. Source: NumPy asks for huge pages for arrays of 4 MiB and more.
MAPPED_BYTES = 4 * 2**20

# Alignment of arrays that JAX takes without a copy on CPUs, in bytes. Source: observed with JAX 0.10.2, 2026-11.
ALIGNMENT = 64
