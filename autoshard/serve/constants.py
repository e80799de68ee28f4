"""Constants of serving."""

ROWS = 8
"""Rows of a batch by default. Chosen, not measured."""

SMALLEST_BUCKET = 32
"""Positions of the shortest prefill program; each longer one has twice as many. Chosen: with few positions, a prefill
costs about what a decode step does, so shorter programs would save little."""

MAX_TOKENS = 200
"""New tokens of a prompt by default, as in `autoshard generate`. Chosen."""

PLANNED_POSITIONS = 512
"""Positions of the prompts for which a vision tower is planned. Chosen: one image of 256 features with its text."""
