"""Training settings of the published models, which their releases do not give."""

from __future__ import annotations

from functools import partial

from autoshard.models.decoder.config import DecoderConfig

trained = partial(DecoderConfig, remat="full", dtype="bfloat16")
"""Makes a config that computes in bfloat16 with float32 parameters and recomputes each layer in the backward pass."""
