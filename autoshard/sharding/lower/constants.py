"""Constants of lowering."""

# Seconds to wait for the process that filters the compiler's log (`compiler_remarks`). It reports in milliseconds.
# Source: chosen.
FILTER_TIMEOUT_S = 10.0

# Bytes that each device sends for an array that XLA replicates, below which the array costs next to nothing and is not
# reported (`compiler_remarks`): about a microsecond on one link of a TPU. Source: chosen.
LEAST_REMARK_BYTES = 64 * 1024

# Number before that of the first scheduling group (`module_collectives`). Source: chosen, above the numbers that a
# user's program is likely to have.
FIRST_SCHEDULING_GROUP = 1_000_000
