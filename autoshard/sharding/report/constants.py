"""Thresholds of the reports: what is left out, and what is assumed. `planner.constants` says what counts as a tie."""

# The chart leaves out plans that take more than this many times the step time of the chosen plan, or the memory limit.
# Source: chosen, because plans further out would compress all the others into one corner.
FAR_FROM_CHOSEN = 10

# Replicated inputs that are neither parameters, optimizer state nor data (counters, keys) are listed if they
# have at least this many bytes. Source: chosen, not measured.
LEAST_OTHER_BYTES = 1024

# Largest number of dimensions of a parameter for which gradients are also recognised in any transposed order: the
# permutations of more dimensions are too many to try. Source: chosen, not measured.
TRANSPOSED_DIMENSIONS = 5

# Size in bytes of an element whose dtype NumPy does not know, such as a typed PRNG key: two words of 32 bits. Source:
# JAX's default PRNG, Threefry. Keys of other generators are larger.
KEY_BYTES = 8
