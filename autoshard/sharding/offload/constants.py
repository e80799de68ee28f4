"""Bounds on which values are offloaded."""

# Bytes of the smallest value that is moved to the host, before sharding; of a stack, those of one slice. Source: the
# size of a memory page on x86-64 and AArch64 Linux. Pinned memory is allocated in pages, so a smaller value saves
# nothing there. What is offloaded depends on it.
SMALLEST_BYTES = 4096

# Names that an error message or a note lists. Chosen.
SHOWN = 12
