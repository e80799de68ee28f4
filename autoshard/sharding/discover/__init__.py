"""Finds a rule for a function that has none, by running it on pieces of its operands."""
