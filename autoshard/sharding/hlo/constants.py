"""Heuristic bounds in reading compiled programs. All are chosen, not measured.

The shares of peak FLOP/s and of memory bandwidth that kernels reach are in `machines.constants`.
"""

# If a collective has no source line, `collectives` looks for one at its operands, at their operands, and so on. This is
# the largest number of such steps, and of operands at each step. Only source lines in reports depend on it.
SOURCE_SEARCH_DEPTH = 4

# Number of entries of each cache of parsed replica groups (`replica_groups`). Only speed depends on it.
GROUP_CACHE_ENTRIES = 8192

# Device n of slice s, counted from 1, has the number n plus s times this. Source: JAX's numbers of TPU devices, and the
# targets of sends between slices that XLA prints (libtpu 0.0.42).
DEVICES_OF_A_SLICE = 100_000
