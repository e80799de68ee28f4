"""Thresholds of plans, their reports and their comparison. All are chosen, not measured.

Only `SAME_PROGRAM` and `SHORTLIST_POOL` can change a plan, and only with `verify` or `measure`. The others bound what
messages and reports show, and the time that this takes.
"""

# --- Shortlist (`shortlist`)

# Relative difference in both step time and memory up to which two candidates count as the same program.
SAME_PROGRAM = 1e-3

# The shortlist is chosen from this many times as many candidates as it has places, so that near duplicates can be
# skipped.
SHORTLIST_POOL = 4

# --- Programs that do not fit (`infeasible`)

# Number of variants that are tried on other machines: those that need the least memory on the requested machine.
LEANEST_VARIANTS = 3

# Largest number of devices of a machine on which all plans are priced. This takes a second or two.
MOST_SEARCHED_DEVICES = 512

# Largest number of shards into which a lean plan divides axes other than the batch (tp x ep x cp). No known expert plan
# has more.
MOST_LEAN_SHARDS = 64

# Fraction of the peak memory below which the message does not list a kind of value.
LISTED_MEMORY_SHARE = 1e-3

# --- Other shardings of an input (`what_if`)

# Relative difference in step time or memory up to which two plans tie, in `explain` and on a plan's page.
ALTERNATIVE_TIE = 1e-3

# Number of alternatives that are priced for each input. This takes about a second.
MOST_ALTERNATIVES = 24

# --- `offload="auto"` (`offload_choice`)

# Number of plans with offload that are made if the plan without it does not fit, and if it does. Each is a search.
MOST_OFFLOADS, MOST_OFFLOADS_IF_FITS = 6, 2

# Fraction by which the estimated step must be shorter with offload, if the plan without it fits. Below it, the order of
# the estimates says little: on compiled programs, step times are off by about this much.
OFFLOAD_MARGIN = 0.1

# --- Contents of plans (`plan_builder`, `activations`)

# Number of activations and gradients in a plan: those that hold the most bytes.
SHOWN_ACTIVATIONS = 40

# Bytes of captured arrays above which a warning and a note report them (`captured_arrays`). Source: chosen.
LARGE_CONSTANTS_BYTES = 2**20

# --- Notes on repeated work (`notes.repeated_work`)

# A note is made if repeated work takes at least this fraction of the step time. Source: chosen.
NOTED_REPEATED_SHARE = 0.25

# --- Notes on code that no plan shards well (`notes.hindrances`)

# Least fraction of the step time that the gather of a sort's operands takes for a note. Faster ones decide no plan.
NOTED_GATHER_SHARE = 0.01

# --- Prices beyond those of another variant (`strategy_prices`)

# The largest relative difference of two sums of doubles that counts as rounding. Source: chosen. Two orders of a sum of
# a million terms differ by about 1e-10.
ROUNDING = 1e-9
