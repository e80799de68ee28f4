"""Rewrites the traced step so that it needs fewer collectives: in loops over time, and for gradients of slices."""
