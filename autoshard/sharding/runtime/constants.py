"""Constants of the runtime."""

# Number of values of one static leaf, each planned and compiled, at which a warning names it. Chosen: a handful of
# models or modes is normal, one text per batch is not. Only the warning depends on it.
MANY_STATIC_VALUES = 8

# Seconds to wait for the process that filters the compiler's log (`compiler_remarks`). It reports in milliseconds.
# Source: chosen.
FILTER_TIMEOUT_S = 10.0

# Bytes that each device sends for an array that XLA replicates, below which the array costs next to nothing and is not
# reported (`compiler_remarks`): about a microsecond on one link of a TPU. Source: chosen.
LEAST_REMARK_BYTES = 64 * 1024
