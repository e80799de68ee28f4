"""Constants of loading data."""

PATIENCE_S = 10.0
"""Seconds that a run that ends waits for a batch that is being read. Chosen: a preempted machine has about 30 s."""
