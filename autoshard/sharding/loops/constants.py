"""Heuristic bounds of collectives that are moved out of loops. None was fitted to a model."""

# Weights are gathered before a loop only if the gathered weights and the gradients of the loop take at most this share
# of a device's memory (`loop_collectives`). Source: chosen, not measured. State and activations take far more memory,
# and a loop over time would gather each weight hundreds of times in a step.
WHOLE_WEIGHTS_SHARE = 1 / 8
