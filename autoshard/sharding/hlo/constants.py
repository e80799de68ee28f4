"""Heuristic bounds in reading compiled programs. All are chosen, not measured.

The shares of peak FLOP/s and of memory bandwidth that kernels reach are in `machines.constants`.
"""

# Where a collective has no source line, `collectives` searches its operands, theirs, and so on for one: the number of
# steps, and the number of operands at each step. Only source lines in reports depend on it.
SOURCE_SEARCH_DEPTH = 4

# Number of entries of each cache of parsed replica groups (`replica_groups`). Only speed depends on it.
GROUP_CACHE_ENTRIES = 8192
