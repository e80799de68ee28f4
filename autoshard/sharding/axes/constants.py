"""Heuristic bounds in the analysis of logical axes.

No record says that any of them was fitted to the models of the benchmark. The plans of these models (`tests/golden`)
depend on the constants that choose axes and roles.
"""

# Rounds of colour refinement that merge the axes of repeated layers (`logical_axes`): operators up to so many steps
# apart tell two axes from each other. Chosen, not measured.
REFINEMENT_ROUNDS = 3
# Fraction of the most activation bytes that any axis carries: an axis that carries at least this much can be the batch
# (`roles.batch_axis`). Chosen, not measured.
BATCH_BYTES_SHARE = 0.7
# Number of weights that are joined into one before they are used, such as the gates of a recurrent cell
# (`roles`): a value made of more inputs than this is not a weight. Chosen, not measured.
MAX_FUSED_WEIGHTS = 16
# Bits of the narrowest float type in which a stored parameter is gathered (`logical_axes.transfer_dtype`): some
# backends do not support collectives on narrower ones.
LEAST_TRANSFER_BITS = 16
# Fraction of an argument's leaves that must come back as updates of themselves for the argument to count as state
# (`state_checks`). Chosen, not measured.
STATE_LEAVES_SHARE = 0.5
# Number of changed leaves that an error message lists (`state_checks`). Chosen.
SHOWN_CHANGES = 5
