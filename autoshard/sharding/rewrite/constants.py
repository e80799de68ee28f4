"""Constants of the rewrites, with unit, source and what depends on them."""

# Largest relative difference, in float64, between a matched region and the kernel's reference. Rounding of float64
# through a softmax of some tens of elements leaves about 1e-14; a wrong factor or mask leaves 1e-3 and more, and an
# epsilon of 1e-6 in a denominator about 1e-7. Every proof depends on it.
PROOF_TOLERANCE = 1e-9

# Standard deviations of the values with which a region is evaluated. The larger one drives scores into a soft cap, and
# weights close to 0 and 1. Source: chosen.
PROBE_SCALES = (1.0, 3.0)

# A raw score far above every soft cap that is detected, which is at most 1e6. The weights at this score give the cap,
# those at a score of 1 give the scale.
LARGE_SCORE = 1e9

# Largest element count of a block in which a mask is evaluated at full size: 2**22 booleans and integers are some tens
# of megabytes. Only time and memory of the analysis depend on it.
MASK_BLOCK = 2**22

# Small sizes for an axis, in order of preference; the size must divide that of the axis. Axes get different sizes where
# possible, so that a confusion of two axes is seen.
SMALL_SIZES = (4, 2, 3, 6, 8, 5, 7, 12, 16, 9, 10, 14)

# Shown in a printed program: characters of one line.
LINE_WIDTH = 160

# --- Where searches end. Source: chosen; each is several times what the formulations of attention in the tests need.
# Beyond a limit, attention is left as it is.

# Values between the two products of attention.
MOST_VALUES_BETWEEN_PRODUCTS = 300

# Operators between an operand of a product of the backward pass and the gradient of attention's result.
MOST_STEPS_TO_GRADIENT = 12

# Changes of shape and type between the second product and a division by the sum of the weights.
MOST_CHANGES_TO_QUOTIENT = 3

# Values that the search for random ones looks at. Beyond it, only the reason is less exact.
MOST_VALUES_FOR_RANDOM = 200

# Operators between a mask and the arrays of padding or segments that it is made of.
MOST_STEPS_TO_ROWS = 40

# Conditions of one attention. Each can mean visible or hidden, and all combinations are tried.
MOST_CONDITIONS = 4

# Draws of small arrays for a mask until some rows see a key, and some see none where that is possible.
MOST_DRAWS = 200
