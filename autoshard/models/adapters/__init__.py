"""Low-rank adapters (LoRA) of a `Decoder`: added to its weights, read and written in PEFT's format, merged."""

from autoshard.models.adapters.insert import add_adapters, trained_parameters, without_adapters
from autoshard.models.adapters.lora_config import LoraConfig
from autoshard.models.adapters.peft_files import load_adapter, save_adapter

__all__ = ["LoraConfig", "add_adapters", "load_adapter", "save_adapter", "trained_parameters", "without_adapters"]
