"""Heuristic bounds in the sharding of values and operators.

Plans, prices and lowered programs depend on all of them. None is known to have been fitted to the benchmark's models.
"""

# Largest slice of a stack of parameters, in bytes, for which a stored stack is gathered once before the loop over it.
# Larger slices are gathered inside the loop (`Layout.is_gathered_before_loop`). The time of smaller messages is almost
# all latency. Source: chosen, not measured.
EARLY_GATHER_SLICE_BYTES = 2**16

# Relative difference in cost below which two strategies of an operator tie (`operator_strategy.choose_strategy`). It
# absorbs rounding errors of floats. Source: chosen.
STRATEGY_TIE = 1e-9

# Largest number of strategies that a process keeps, so that each is chosen only once (`known_strategies`). It bounds
# memory: one strategy takes about 2 KiB. Source: chosen; a search over the variants of Llama-3 8B for 64 chips chooses
# 6000.
MOST_KNOWN_STRATEGIES = 50_000

# Largest number of requested plans that a process keeps parsed (`plan_request.parse_request`). It bounds memory: one
# takes about 1 KiB. Source: chosen; a search has some hundred candidates.
MOST_KNOWN_REQUESTS = 4096

# Least size, in bytes, of an array of state for which storing it in shards is worth padding. Source: chosen, not
# measured.
LARGE_STATE_BYTES = 2**20
