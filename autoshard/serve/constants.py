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

CANDIDATES = 128
"""Likeliest tokens of a row that `top_k` and `top_p` are computed from. If more can be needed, all scores are sorted.
Chosen: above usual values of `top_k`, such as 20 to 64 in the `generation_config.json` of published models."""

CHUNKS = 64
"""Largest number of chunks of a vocabulary whose likeliest tokens are found apart. Chosen: a multiple of every usual
number of devices that share a vocabulary. The number is its greatest common divisor with the vocabulary's size."""
