"""Lower bounds of the time of a step."""
