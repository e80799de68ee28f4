"""Bounds on which values are offloaded."""

# Bytes of the smallest value that is moved to the host, before sharding; of a stack, those of one slice. Source: the
# size of a memory page on x86-64 and AArch64 Linux. Pinned memory is allocated in pages, so a smaller value saves
# nothing there. What is offloaded depends on it.
SMALLEST_BYTES = 4096

# Of the optimizer's state, the smallest arrays stay on the device: each has less than this share of the bytes of the
# largest array, and together they have less than this share of all bytes. They are mostly the moments of biases and of
# scales of norms. Chosen: with GPT 350M on v5e:2x2, they have 0.3 % of the bytes, and 888 of 1,468 transfers. libtpu
# 0.0.42.1 refuses to compile some of these: "Lane slice updating is not supported in async dynamic update slice".
SMALL_SHARE = 0.01

# Names that an error message or a note lists. Chosen.
SHOWN = 12
