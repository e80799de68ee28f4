"""Thresholds of the reports: what counts as a tie, and what is left out."""

# Relative difference of step times up to which the page calls two plans equally fast, and does not name a difference
# as the reason why a plan was not chosen. Source: chosen, not measured. `planner.constants.ALTERNATIVE_TIE` is the
# wider threshold of `plan.explain`, where both sides are estimates of one plan with a small change.
EQUALLY_FAST = 1e-4

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
