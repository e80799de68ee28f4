"""What a search over the variants of a train step tries, how many it plans, and the rounding of vocabularies."""

REMATS = ("none", "dots", "full")
"""The remat policies without named values that a search tries, from the one that stores most values to the one that
stores fewest."""

SEARCHED_MICROBATCHES = (1, 2, 4)
"""The numbers of microbatches that a search tries. Chosen, not measured."""

SEARCHED_REMAT_MIXES = ((3, 4), (1, 2), (1, 4))
"""Mixed remat policies that a search tries: `(n, m)` gives n of every m layers the lighter policy.
Chosen, not measured."""

SCREENED_STRATEGIES = 40
"""How many of the fastest strategies with full recomputation are priced for each further number of microbatches.
Chosen, not measured."""

PROBED_STRATEGIES = 3
"""Under how many of the fastest strategies of each number of microbatches named values are priced. Chosen, not
measured."""

MOST_PRICED = 6
"""How many variants without values on the host are priced after the probes at most, and how many with such values.
Chosen, not measured."""

PRICED_FITTING = 2
"""How many of these have to fit before the search plans the best of them. Chosen, not measured."""

WORTH_PRICING = 1.005
"""A variant is priced if its additive price is at most this many times the best price so far. Chosen, not measured."""

PLANNED = 2
"""How many variants are planned in one round at most. Chosen, not measured."""

WORTH_PLANNING = 1.01
"""A further variant is planned in the same round if its price is at most this many times that of the first. Chosen,
not measured."""

MOST_PLANNED = 6
"""How many variants are planned at most, if none fits. Chosen, not measured."""

HOST_DOUBT = 0.1
"""The fraction of the time on the link to the host that the ranking of variants adds to the step time, although compute
may hide it. Chosen, not measured."""

OFFLOADING_PLATFORMS = ("tpu",)
"""The platforms on which a search moves values to the host. On others it does so only for names that are given: on GPUs
compiled programs with such transfers have not been compared with one device, and CPU devices have no memory of their
own."""

LEAST_OFFLOAD_GAIN = 0.01
"""A variant with values on the host is planned if it ranks faster by this part than the best without. Chosen, not
measured."""

VOCAB_MULTIPLE = 64
"""A vocabulary that grows to hold the data's is rounded up to a multiple of this, so that it can be sharded.
Chosen, not measured."""
