"""Constants of the choice of microbatches."""

MOST_TRIALS = 8
"""How many numbers of microbatches `microbatches="auto"` plans: 1, 2, 4, ..., 128. In a pipeline of N stages, they are
N, 2 N, 4 N, ..., 128 N. Chosen: few batches can be divided into more than 128 parts."""

GAIN = 0.02
"""The least gain, as a fraction of the step time, for which "auto" takes more microbatches when fewer already fit.
Chosen: twice the 1 % by which estimates of one program differ between versions of JAX (`tests/golden`)."""
