"""Numbers of trials, tolerances and thresholds of the oracle. All are chosen, not measured.

Findings of `check_rule` depend on them. `tests/spmdrules` checks all rules with these values.
"""

# Number of pieces into which a factor is split: the first of these that divides its size. Others are not tried.
PIECE_COUNTS = (2, 3, 5)

# Number of sets of operands on which the strategies that a rule declares are run, and the number of additional sets for
# operators with boolean operands, which carry little information.
TRIALS = 3
BOOLEAN_TRIALS = 3

# Number of sets of operands on which undeclared strategies are run. A wrong way of joining may hold by chance: in half
# of all pairs of numbers, the minimum is the first one.
SEARCH_TRIALS = 12

# Number of sets of operands on which linearity is checked.
LINEARITY_TRIALS = 3

# An undeclared kind of factor is reported only if the results vary on at least this fraction of the sets of operands.
INFORMATIVE_SHARE = 0.5

# Allowed relative error (`probe_values.relative_error`) by bytes of a real number. It is wide enough for sums with
# large terms that are rounded one by one.
TOLERANCES = {2: 0.1, 4: 1e-4, 8: 1e-10}

# Allowed relative error for all other widths, such as float8.
NARROWEST_TOLERANCE = 0.3

# Allowed relative error for linearity that a rule does not declare. A rule need not declare what holds only up to the
# rounding of a narrow dtype.
STRICT_TOLERANCE = 2e-5

# Smallest number of elements of results that are compared for undeclared linearity. With a single pair of sums, max and
# sum may agree by chance: the larger of two sums is the sum of the larger terms in half of all cases.
MIN_COMPARED_ELEMENTS = 8
