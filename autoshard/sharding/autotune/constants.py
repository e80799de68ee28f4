"""Thresholds and counts of choosing among plans by compiling or running them. All are chosen, not measured.

The plan that `verify=` and `measure=` choose depends on them, except for the lengths of notes and the cache.
"""

# --- Compiled plans (`selection`, `compiled_time`).

# Multiples of the memory limit. For each, `verify` with k >= 2 also compiles the fastest plan with an estimated peak up
# to this multiple, because XLA rematerializes what does not fit.
OVER_LIMIT = (1.25, 1.5)

# Number of option sets under which `verify` also compiles the fastest plan to machine code. It schedules the plan under
# all sets that apply.
MOST_OPTION_SETS = 3

# A set must shorten the step by more than this fraction to be chosen. Smaller gains are below the precision of audits.
LEAST_OPTION_GAIN = 0.002

# Number of characters of each compiler message in a plan's notes.
COMPILER_MESSAGE_CHARS = 120

# --- Settled plans (`verify="auto"`, `settling`, `lessons`)

# Seconds for all compilations, unless the user gives a number.
SETTLING_S = 600.0

# Most plans of one kind that are compiled in search of one that fits.
MOST_TRIES = 3

# Most plans that are compiled besides the fastest of the best kind (`settling.close_plans`).
MOST_CLOSE = 2

# Number of plans of one kind that are considered.
POOL_OF_KIND = 12

# Relative difference up to which two estimates of a plan count as the same: floating-point sums vary in their order.
SAME_ESTIMATE = 1e-9

# --- Measured plans (`measured_time`).

# Number of turns. In a turn, each plan runs some steps. After the first turn, plans that are slower than
# `SLOWEST_RERUN` are skipped.
TURNS = 3

# Number of further turns, for the plans that are not slower than `SLOWEST_FINAL`.
FINAL_TURNS = 4

# Smallest and largest number of timed steps in one turn.
LEAST_STEPS, MOST_STEPS = 2, 10

# Seconds after which a turn starts no further step. Plans over several processes ignore it, because the clocks of
# processes disagree; they time `LEAST_STEPS`.
TURN_S = 0.5

# A plan is run again if its median step time is at most this multiple of the fastest plan's.
SLOWEST_RERUN = 1.4

# The same for the final turns.
SLOWEST_FINAL = 1.08

# Number of plans that the note names.
SHOWN_PLANS = 5

# Number of characters of each run's error in a plan's notes.
RUN_ERROR_CHARS = 160

# --- Synthetic inputs (`synthetic_inputs`).

# Upper bound of floats. The lower bound is 0.
MOST_FLOAT = 0.05

# Number of bits of integers: they are 0 to 7.
INTEGER_BITS = 3

# Number of entries of the cache of compiled input makers. Only speed depends on it.
INPUT_CACHE_ENTRIES = 1024
