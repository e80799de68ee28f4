"""Heuristic bounds in the analysis of logical axes.

There is no record that any of them was fitted to the benchmark's models. The plans of these models (`tests/golden`)
depend on the constants that choose axes and roles.
"""

# Number of rounds of colour refinement with which `logical_axes` merges the axes of repeated layers. Each round lets
# operators one step further away tell two axes apart. Source: chosen, not measured.
REFINEMENT_ROUNDS = 3

# An axis can be the batch if it carries at least this fraction of the activation bytes of the axis that carries most
# (`rows.batch_axis`). Source: chosen, not measured.
BATCH_BYTES_SHARE = 0.7

# Largest number of inputs from which one weight is computed, such as the gates of a recurrent cell that are
# concatenated. `roles` does not treat values of more inputs as weights, except stacks. Source: chosen, not measured.
MAX_FUSED_WEIGHTS = 16

# If weights without an axis for tensor parallelism have more than this fraction of the weights' bytes, further axes are
# sharded (`weight_cover`). Source: chosen, just above the largest fraction among the benchmark's models: the patch
# embedding of vit-tiny has 0.11 of its weights' bytes.
WHOLE_WEIGHTS_SHARE = 0.125

# Narrowest float type, in bits, in which a stored parameter is gathered (`logical_axes.transfer_dtype`). Source:
# chosen, because not all backends support collectives on narrower types.
LEAST_TRANSFER_BITS = 16

# Fraction of an argument's returned leaves that must be updates of themselves for the argument to be state
# (`state_checks`). Source: chosen, not measured.
STATE_LEAVES_SHARE = 0.5

# Number of changed leaves that an error message lists (`state_checks`). Source: chosen.
SHOWN_CHANGES = 5

# Least number of input features in each shard of a convolution's kernel for it to be stored along its input features
# (`storage_dims`). With fewer, it is stored along its output features. Source: a tile of a TPU has 16 rows of
# 16-bit elements.
LEAST_INPUT_FEATURES = 16

# Along its last dimension in memory, a gradient is reduce-scattered if each shard has a multiple of so many elements.
# Source: compiled for TPUs (`storage_dims`).
SCATTERED_COLUMNS = 256
