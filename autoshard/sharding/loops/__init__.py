"""Moves collectives out of loops that use the same weights in every iteration, such as loops over time."""
