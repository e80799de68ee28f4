"""What a search over the variants of a train step tries, how many it plans, and the rounding of vocabularies."""

from autoshard.sharding.search.constants import KEPT_CANDIDATES

REMATS = ("none", "dots", "full")
"""The remat policies without named values that a search tries, from the one that stores most values to the one that
stores fewest."""

SEARCHED_MICROBATCHES = (1, 2, 4)
"""The numbers of microbatches that a search tries. Chosen, not measured."""

SEARCHED_REMAT_MIXES = ((3, 4), (1, 2), (1, 4))
"""Mixed remat policies that a search tries: `(n, m)` gives n of every m layers the lighter policy.
Chosen, not measured."""

SCREENED_STRATEGIES = KEPT_CANDIDATES
"""For each number of microbatches after the first, this many of the fastest strategies with full recomputation are
priced: those that a search prices in any case."""

PROBED_STRATEGIES = 3
"""For each number of microbatches, named values are priced under this many of its fastest strategies. Chosen, not
measured."""

MOST_PRICED = 6
"""After the probes, at most this many variants without values on the host are priced, and at most this many with such
values. Chosen, not measured."""

PRICED_FITTING = 2
"""Pricing ends when this many of the priced variants fit the memory with room to spare (`memory_doubt`), under the
strategy of their additive price. Chosen, not measured."""

WORTH_PRICING = 1.005
"""A variant is priced if its additive price is at most this many times the best price so far. Chosen, not measured."""

PLANNED = 2
"""In one round, at most this many variants are planned. Chosen, not measured."""

WORTH_PLANNING = 1.01
"""A round also plans variants whose price is at most this many times the price of its first variant. Chosen, not
measured."""

MOST_PLANNED = 6
"""The number of variants after which the search ends if none of them fits. Chosen, not measured."""

HOST_DOUBT = 0.01
"""The ranking of variants adds this fraction of the time on the link to the host to the step time, because compute may
hide less of it than estimated. Source: chosen. `benchmarks/ranked_plans.py` prints by how much the exposed time exceeds
its estimate, as a fraction of the time on the link. It is at most 0.001 for GPT-3 175B and Llama 3.1 405B on v5p:4x8x8
and GPT 1.3B on v5e:4x4. It is 0.97 for GPT 2.6B at 95 % of the memory, which `memory_doubt` penalizes. It is 0.14 for
Mistral 7B on v6e:2x4 with `qkv` in host memory: 0.50 s of copies are exposed (`copies` in
`benchmarks/results/recipes/mistral-7b-v6e-8.json`), and 0.05 s of 3.15 s by the estimate. No constant is fitted to that
recipe, because recipes judge the planner."""

OFFLOADING_PLATFORMS = ("tpu",)
"""The platforms on which a search moves values to the host. On others it does so only for names that are given: on GPUs
compiled programs with such transfers have not been compared with one device, and CPU devices have no memory of their
own."""

LEAST_OFFLOAD_GAIN = 0.01
"""A variant with values on the host is planned only if its ranked time is lower than that of the best variant without,
by at least this fraction. Chosen, not measured."""

VOCAB_MULTIPLE = 64
"""A vocabulary that grows to hold the data's is rounded up to a multiple of this, so that it can be sharded.
Chosen, not measured."""
