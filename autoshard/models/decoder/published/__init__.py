"""Published sizes as configurations of `Decoder`, as they are trained.

Use `dataclasses.replace` for other settings. The context is that of the release; `models.workloads` trains on shorter
sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.decoder.published.gemma import GEMMA
from autoshard.models.decoder.published.mixtures import MIXTURES

DECODERS: Mapping[str, DecoderConfig] = MappingProxyType({**GEMMA, **MIXTURES})
"""The published sizes, by name."""
