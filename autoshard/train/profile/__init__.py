"""Traces of steps: recording them, naming what is in them, and comparing them with the plan."""
