"""Constants of the choice between forms of the experts, with unit and source. Only speed depends on them."""

# Tokens for which the experts of a shard are computed densely on TPUs. A product with a matrix of 16-bit elements makes
# one FLOP for each token and byte. Up to this many tokens it takes the matrix's traffic time on every TPU: v5p has the
# fewest FLOPs for each byte (459 TFLOP/s, 2.765 TB/s: 166), and a matrix unit takes 128 rows at a time.
DENSE_TOKENS = 128

# The largest number of choices that are computed one by one. Source: chosen. Each choice adds a product for each weight
# to the program, so the time of compilation is linear in it.
LARGEST_UNROLLED = 32
