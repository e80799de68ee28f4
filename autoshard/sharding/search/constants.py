"""Thresholds of the search for a plan. Unless said otherwise, the chosen plan depends on them.

Each comment gives the source. There is no record of any being fitted to the models of the benchmark.
"""

# --- Candidates (`layout_search`)

# Number of decimals of a step time in microseconds when candidates are compared, so that equal plans tie. Source:
# chosen.
TIME_DECIMALS = 3

# Number of the fastest candidates that get the best device assignment. The others keep the default assignment. Source:
# chosen, not measured.
ASSIGNED_CANDIDATES = 12

# Number of the fastest known plans that are always priced, whether they fit or not: a search over variants begins with
# them, and they may fit with another variant. Source: chosen, not measured.
KEPT_CANDIDATES = 40

# Most that the best device assignment gains over the default one, relative to the step time, for known plans that are
# left out because few plans fit. Source: chosen, not measured.
MOST_REASSIGNED_GAIN = 0.5

# --- Ways of attention (`sequence_ways`)

# Number of known plans that shard a sequence, the best for each use of the inner mesh axes, whose attention is priced
# with all-to-alls and on a ring, too; one more may be added (`sequence_ways`). Source: chosen for the time of planning,
# not measured.
PLANS_WITH_OTHER_ATTENTION = 4

# --- Local search (`local_search`)

# Number of known plans, the fastest of each mesh first, from which the search starts. Source: chosen, not measured.
CLIMB_STARTS = 2

# Least relative gain for which one change of a plan is made. Source: chosen, not measured.
LEAST_CHANGE_GAIN = 2e-3

# The search from a start ends if the sum of the gains of all single changes, times this factor, is less than
# `LEAST_GAIN_OVER_KNOWN`. The factor is above 1 because one change can make others possible. Source: chosen.
GAINS_TOGETHER = 2.0

# Most that a changed plan may compute, communicate and send, relative to the known plan from which it started. XLA
# hides less communication in unusual plans than the estimate says. Source: the value is chosen, the reason is a
# compiled plan. Llama-2 70B on v5p:8x8x4, batch 64: `fsdp:64 tp:4 seq` with `tp-ffn` is 6 % faster by the estimate, but
# 15 % slower compiled.
MOST_EXTRA_WORK = 1.05

# Least relative gain of a changed plan over every known plan for it to be a candidate. It should exceed the error of
# the estimate between two plans. Source: chosen after plans were compiled for their target. Llama-3 8B on v5e:16x16:
# 2.5 % faster by the estimate, 1 % slower compiled. Llama-2 70B, batch 256, a plan ten changes away: 6 % faster by the
# estimate, more than twice as slow compiled.
LEAST_GAIN_OVER_KNOWN = 0.15

# --- Spread of the optimizer's state (`state_spread`)

# Number of known plans, the fastest for each use of the inner mesh axes first, whose state is spread in other ways.
# Source: chosen for the time of planning, not measured.
SPREAD_STARTS = 2

# Least relative gain of a plan with another spread over every known plan for it to be a candidate. It is smaller than
# `LEAST_GAIN_OVER_KNOWN`, because only collectives of known plans occur in it. Source: chosen, not measured.
LEAST_SPREAD_GAIN = 0.01

# --- Padding (`padding`). Only what plans report about padding depends on these; no plan is chosen by them.

# Number of other plans, the fastest ones, that are priced with padding for each logical axis and number of shards.
# Source: chosen for the time of planning, not measured.
PADDED_RIVALS = 2

# Number of padded programs that are priced. Source: chosen for the time of planning, not measured.
PADDED_PROGRAMS = 4

# Most that an axis is padded for a plan other than the chosen one, relative to its size. Source: chosen, not measured.
MOST_RIVAL_PADDING = 1.125

# Least relative gain that is reported. Source: chosen, not measured; smaller gains are noise.
LEAST_PADDING_GAIN = 0.005

# --- Kinds of plans (`strategy_kinds`)

# The ratio of the step times of two plans of different kinds for one program: the estimated ratio differs from the
# compiled one by at most `KIND_ERROR` in half of all pairs, and by at most `MOST_KIND_ERROR` in 9 of 10. Source:
# `benchmarks/cost_model.py` (`pairs`). Most of its 162 pairs are plans of Llama-3 8B on an h100; the 23 pairs on TPUs,
# recipes included, give 0.14 and 0.24. Reports, `verify="auto"` and the groups of rows that are searched
# (`late_sums`) depend on them, and so do plans with idle devices (`layout_search`).
KIND_ERROR, MOST_KIND_ERROR = 0.11, 0.23

# The same for two plans of one kind, in half of all pairs. Source: 50 pairs of compiled plans for programs of the
# corpus that were used to develop the planner (`benchmarks/bench_formulations.py --open`): 0.032. Only `verify="auto"`
# and `verify="schedule"` depend on it.
SAME_KIND_ERROR = 0.03

# In 9 of 10 cases, a compiled program takes at most this fraction more memory than estimated. Source:
# `benchmarks/cost_model.py` (`memory`). Only `verify="auto"` depends on it.
MOST_MEMORY_ERROR = 0.17
