"""Barriers and layout constraints that make XLA:TPU compile a program as planned."""
