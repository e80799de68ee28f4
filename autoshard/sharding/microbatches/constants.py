"""Constants of the choice of microbatches."""

MOST_TRIALS = 8
"""The numbers of microbatches that `microbatches="auto"` plans, 1, 2, 4, ... Chosen: beyond 128, a loop of that many
iterations rarely has a batch to divide."""

GAIN = 0.02
"""The least gain, as a fraction of the step time, for which "auto" takes more microbatches than fit. Chosen: twice the
1 % by which estimates of one program differ between versions of JAX (`tests/golden`)."""
