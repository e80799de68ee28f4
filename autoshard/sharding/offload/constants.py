"""Bounds on which values are offloaded, and when loops move them."""

# Bytes of the smallest value that is moved to the host, before sharding; of a stack, those of one slice. Source: the
# size of a memory page on x86-64 and AArch64 Linux. Pinned memory is allocated in pages, so a smaller value saves
# nothing there. What is offloaded depends on it.
SMALLEST_BYTES = 4096

# Names that an error message or a note lists. Chosen.
SHOWN = 12

# Shares of the FLOPs of one iteration of a loop. A slice of a stack in host memory is fetched in the iteration that
# uses it, if it is needed after the first share. A result is sent to host memory in the iteration that computes it,
# if that is before the second share. Source: chosen. The second of two equal layers in an iteration starts at 0.5, so
# it fetches and sends in its own iteration.
FETCHED_NOW_FROM, SENT_NOW_UNTIL = 0.45, 0.55
