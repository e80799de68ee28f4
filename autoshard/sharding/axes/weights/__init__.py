"""Weights: which of their axes tensor parallelism shards, and which weights are computed from parameters."""
