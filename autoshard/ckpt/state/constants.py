"""Bounds of packing small leaves and of computing digests.

The format of a step does not depend on them: a step says which leaves are packed. Times are of one machine with two CPU
cores, and no command prints them; `make bench BENCH=checkpoint` prints the time of whole saves and restores.
"""

# A leaf of fewer bytes can be packed (`array_packing`). Source: measured, writing this many bytes takes about as long
# as Orbax's overhead for one array.
PACKABLE_BYTES = 2**20

# If a state has at most this many packable leaves, none is packed, and plain Orbax reads all of them by path. Source:
# chosen, the overhead of this many arrays is about 0.1 s.
MAX_UNPACKED_LEAVES = 64

# Least number of leaves of one shape, dtype and sharding that are packed. Source: chosen, compiling a program for fewer
# is not worth it.
MIN_PACK_LEAVES = 8

# Largest number of leaves in one pack. Source: chosen; measured, compiling the program takes 1 ms for each leaf.
MAX_PACK_LEAVES = 256

# Largest size of a pack with several leaves. Readers of single leaves hold one pack in memory. Source: chosen.
MAX_PACK_BYTES = 32 * 2**20

# Largest number of dimensions of an array that TensorStore writes, and so of a leaf; a packed leaf has one less.
MAX_DIMS = 31

# Number of leaves that one call of a program takes out of a pack. Source: chosen; measured, compiling takes 20 ms for
# each leaf, a call 0.5 ms.
LEAVES_PER_SPLIT = 16

# Number of elements of a NumPy array that are digested at once (`array_digest`). Bounds memory. Source: chosen.
DIGEST_BLOCK_ELEMENTS = 2**16

# Number of leaves that one program digests. Source: chosen; measured, compiling takes some milliseconds for each leaf.
LEAVES_PER_DIGEST = 128

# Bytes of leaves in host memory that are copied to the devices at once to be digested. Bounds memory. Source: chosen.
MAX_MOVED_BYTES = 64 * 2**20
