"""Bounds on the memory and the time that reading and writing steps takes in addition to the state."""

# Bytes of arrays that Orbax encodes and writes, or reads and decodes, at once (`orbax_storage`). Only speed and peak
# memory depend on it. Source: chosen, enough to keep a disk busy and little beside a state; `make bench
# BENCH=checkpoint` prints time and memory.
CONCURRENT_BYTES = 128 * 2**20

# Number of copies of an array's bytes that are in memory while Orbax reads it: as stored, decoded, in transfer to a
# device, and freed but kept by the allocator. `CONCURRENT_BYTES` is divided by it. Source: counted, not measured.
COPIES_WHILE_READING = 4

# How long a save waits until the thread in the background dispatches the digests (`orbax_storage`), in seconds. Source:
# chosen; measured, it takes some milliseconds. If it takes longer, the step is written after the next train step.
MAX_HANDOVER_S = 0.05
