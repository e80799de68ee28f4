"""Heuristic bounds of collectives that are moved out of loops. None was fitted to a model."""

# Weights are gathered before a loop only if the gathered weights and the gradients of the loop take at most this share
# of a device's memory (`loop_collectives`). Source: chosen, not measured. State and activations take far more memory,
# and a loop over time would gather each weight hundreds of times in a step.
WHOLE_WEIGHTS_SHARE = 1 / 8

# Shares of the FLOPs of one iteration of a loop. A slice of a stack in host memory is fetched in the iteration that
# uses it, if it is needed after the first share. A result is sent to host memory in the iteration that computes it,
# if that is before the second share. Source: chosen. The second of two equal layers in an iteration starts at 0.5, so
# it fetches and sends in its own iteration.
FETCHED_NOW_FROM, SENT_NOW_UNTIL = 0.45, 0.55
