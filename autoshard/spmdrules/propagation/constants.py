"""Bounds on the iterations of propagation. Both are chosen, not measured."""

# Rounds in which the specs of open values are inferred, each a forward and a backward walk. If they do not converge,
# the specs of the last round are used.
MAX_INFERENCE_ROUNDS = 4

# Iterations in which the fixed point of a loop's carries is searched. If they do not converge, each carry gets the
# same placement before and after an iteration: the cheaper one of the two that were found last.
MAX_CARRY_ROUNDS = 4
