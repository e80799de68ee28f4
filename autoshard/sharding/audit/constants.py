"""Limits and thresholds of audits. All are chosen, not measured."""

# Seconds after which a compiler is stopped, unless the caller of `verify` gives another limit.
TIMEOUT_S = 900.0

# Seconds that a comparison with other options gets at least, though the time of `verify` is over.
LEAST_TIMEOUT_S = 1.0

# Largest timeout in seconds that `aot_compile` passes to `subprocess.run`, which rejects very large ones.
MAX_TIMEOUT_S = 1e6

# Number of last lines of a crashed compiler's stderr that the message repeats.
SHOWN_CRASH_LINES = 3

# Differences between planned and compiled traffic up to this fraction of all bytes are not reported (`traffic_diff`).
NEGLIGIBLE_SHARE = 5e-3

# If at most this many planned bytes are left after matching, they are rounding errors and are ignored (`traffic_diff`).
ROUNDING_BYTES = 1e-6

# Temporaries smaller than this fraction of the peak memory are not reported as replicated (`replicated_arrays`).
LARGE_TEMPORARY_SHARE = 0.02

# Up to this many requested options are each left out once to find those that change nothing, one compilation each.
MOST_SINGLE_OPTIONS = 3

# Instructions that are followed from a collective to the product that takes its result (`module_origins`).
CONSUMER_SEARCH_STEPS = 12

# Number of entries of each list that the text of an audit shows. The audit itself has all of them.
SHOWN_ENTRIES = 8

# Number of device groups that the text of a collective shows if they span no mesh axis.
SHOWN_GROUPS = 4

# Instructions that are followed from a collective to the input or the parameter that it moves; chosen.
SEARCH_STEPS = 200

# Tensors that the name of a collective lists; chosen.
NAMED_TENSORS = 3
