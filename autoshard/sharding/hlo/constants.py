"""Heuristic bounds in reading compiled programs. All are chosen, not measured; none depends on the benchmark's models.

The shares of peak and of memory bandwidth that kernels reach stand in `machines.constants`.
"""

# Where a collective has no source line: steps from operand to operand, and operands at each step, that are searched for
# one (`collectives`).
SOURCE_SEARCH_DEPTH = 4
# Entries of the caches of parsed replica groups (`replica_groups`).
GROUP_CACHE_ENTRIES = 8192
