"""Bounds and thresholds of the search for a rule. All are chosen, not measured.

The rules that `discover` finds, and its running time, depend on them.
"""

# Number of pieces in the first attempt to split a place: the first of these that divides the number of its elements.
FIRST_PIECE_COUNTS = (2, 3, 5, 7)

# Largest number of pieces that is tried.
MAX_PIECES = 16

# Bounds for the search at one place: the largest number of combinations with places of other operands that are tried,
# and the number of combinations that run on pieces after which the search stops. The first pair is for the place right
# after the known factors of a dimension, the second pair for later places.
NEXT_LIMITS = (40, 6)
ANYWHERE_LIMITS = (8, 2)

# Number of sets of values on which numbers of pieces other than the first are tried.
FINER_SETS = 5

# Smallest number of informative sets of values that counts as evidence.
MIN_SETS = 3

# A difference up to this many times the effect of rounding the operands once counts as rounding.
SLACK_FACTOR = 8

# Largest relative error that counts as rounding.
MAX_SLACK = 0.01

# Number of sets of values of the search that are added to the oracle's sets in the final check.
FINAL_SETS = 4

# Relative rounding error that the oracle's tolerance always covers.
MIN_NOISE = 1e-5

# Number of sets of values on which linearity is checked.
LINEARITY_SETS = 3

# Number of failed attempts that the text of a `Refusal` shows.
SHOWN_ATTEMPTS = 2
