"""Weights: which axes tensor parallelism shards, which weights are computed, and sums such as those of gradients."""
