"""Optimizer, train state, moving average of the weights, and the step as a function of arrays."""
