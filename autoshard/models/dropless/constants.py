"""Constants of the choice between forms of the experts, with unit and source. Only speed depends on them."""

# Tokens for which the experts of a shard are computed densely on TPUs. A product with a matrix of 16-bit elements makes
# one FLOP for each token and byte. Up to this many tokens it takes the matrix's traffic time on every TPU: v5p has the
# fewest FLOPs for each byte (459 TFLOP/s, 2.765 TB/s: 166), and a matrix unit takes 128 rows at a time.
DENSE_TOKENS = 128

# The largest number of choices that are computed one by one. Source: chosen. Each choice adds a product for each weight
# to the program, so the time of compilation is linear in it.
LARGEST_UNROLLED = 32

# Largest number of elements of a piece of a matrix whose codes are decoded at a time. Source: chosen. In bfloat16, a
# piece takes 4 MiB, as do its repeated scales, so those of three products fit in a chip's own memory.
PIECE_ELEMENTS = 2 * 2**20

# Rows of a tile of 4-bit elements on TPUs. Source: the layout that XLA gives such arrays, `T(64,128)`.
TILE_ROWS = 64
