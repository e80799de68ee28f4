"""Moves values of a traced step to host memory: what waits for the backward pass, and the optimizer's state."""
