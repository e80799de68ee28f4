"""Rewrites the traced step so that it needs fewer collectives, or so that more devices share the rows of its batch."""
