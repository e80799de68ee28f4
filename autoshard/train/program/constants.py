"""The values that a search over the variants of a train step tries, and the rounding of vocabularies."""

REMATS = ("none", "dots", "full")
"""The remat policies that a search tries, from the one that stores most values to the one that stores fewest."""

SEARCHED_MICROBATCHES = (1, 2, 4)
"""The numbers of microbatches that a search tries. Chosen, not measured."""

SEARCHED_REMAT_MIXES = ((3, 4), (1, 2), (1, 4))
"""Mixed remat policies that a search tries: `(n, m)` gives n of every m layers the lighter policy.
Chosen, not measured."""

VOCAB_MULTIPLE = 64
"""A vocabulary that grows to hold the data's is rounded up to a multiple of this, so that it can be sharded.
Chosen, not measured."""
