"""A decoder-only transformer whose switches cover the published families: Llama, Mistral, Qwen, Gemma, Mixtral, ..."""

from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.decoder.decoder import Decoder
from autoshard.models.decoder.kinds import ExpertsConfig, LatentConfig, LayerKind
from autoshard.models.decoder.positions.rotary import Rotary

__all__ = ["Decoder", "DecoderConfig", "ExpertsConfig", "LatentConfig", "LayerKind", "Rotary"]
