"""Constants of lowering."""

# Seconds to wait for the process that filters the compiler's log (`compiler_remarks`). It reports in milliseconds.
# Source: chosen.
FILTER_TIMEOUT_S = 10.0

# An array that XLA replicates is not reported if each device sends fewer bytes than this for it (`compiler_remarks`).
# They take about a microsecond on one link of a TPU. Source: chosen.
LEAST_REMARK_BYTES = 64 * 1024

# The numbers of our scheduling groups are above this one (`module_collectives`). Source: chosen, above the numbers that
# a user's program is likely to have.
FIRST_SCHEDULING_GROUP = 1_000_000
