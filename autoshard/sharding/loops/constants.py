"""Heuristic bounds of collectives that are moved out of loops. None was fitted to a model."""

# Largest share of a device's memory that whole weights and gradients of loops may take (`loop_collectives`). Source:
# chosen, not measured. It is small beside the state and the activations, which decide whether a plan fits; a recurrent
# weight is used hundreds of times in a step, so that its gathers in each iteration cost far more than this memory.
WHOLE_WEIGHTS_SHARE = 1 / 8
