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
"""Number of a row's likeliest tokens from which `top_k` and `top_p` are computed. If these are too few, all scores are
sorted. Chosen: above the usual `top_k` of published models, which is 20 to 64 in their `generation_config.json`."""

CHUNKS = 64
"""Largest number of chunks into which a vocabulary is split. The likeliest tokens of each chunk are found separately.
The number that is used is the greatest common divisor of this one and the vocabulary's size. Chosen: a multiple of the
usual numbers of devices that shard a vocabulary."""
