"""Propagation: finds the sharding of every value of a program from those of its arguments."""
