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

# Shares of the FLOPs of one iteration of a loop. A slice of a stack in host memory is fetched in the iteration that
# uses it, if it is needed after the first share. A result is sent to host memory in the iteration that computes it,
# if that is before the second share. Source: chosen. The second of two equal layers in an iteration starts at 0.5, so
# it fetches and sends in its own iteration.
FETCHED_NOW_FROM, SENT_NOW_UNTIL = 0.45, 0.55
