"""Named settings to start from."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autoshard.errors import ConfigError
from autoshard.models import GPTConfig
from autoshard.train.config.merging import suggestion
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.step.optimizer import OptimizerConfig


def _gpt2(name: str, layers: int, heads: int, width: int) -> TrainConfig:
    """Shapes of GPT-2 (Radford et al. 2019) with the optimizer settings of nanoGPT."""
    return TrainConfig(
        preset=name,
        gpt=GPTConfig(
            vocab=50304,
            layers=layers,
            heads=heads,
            width=width,
            context=1024,
            norm="layernorm",
            positions="learned",
            mlp="gelu",
            bias=True,
            dtype="bfloat16",
        ),
        optimizer=OptimizerConfig(learning_rate=6e-4, min_learning_rate=6e-5, warmup_steps=2000),
        steps=100_000,
        batch_size=512,
        microbatches=8,
        eval_every=1000,
        checkpoint_every=1000,
    )


PRESETS: Mapping[str, TrainConfig] = MappingProxyType(
    {
        # For a first run: it takes minutes on two CPU cores, split into eight virtual devices.
        "quick": TrainConfig(
            gpt=GPTConfig(layers=4, heads=4, width=128, context=128),
            optimizer=OptimizerConfig(learning_rate=3e-3, min_learning_rate=3e-4, warmup_steps=25, beta2=0.99),
            steps=250,
            batch_size=64,
            virtual_devices=8,
            eval_every=125,
            eval_batches=8,
            checkpoint_every=125,
            prompt="def ",
        ),
        # nanoGPT's published CPU settings for its character-level Shakespeare example.
        "shakespeare": TrainConfig(
            preset="shakespeare",
            gpt=GPTConfig(layers=4, heads=4, width=128, context=64),
            optimizer=OptimizerConfig(
                learning_rate=1e-3, min_learning_rate=1e-4, warmup_steps=100, beta2=0.99, weight_decay=0.1
            ),
            steps=2000,
            batch_size=12,
            eval_every=500,
            checkpoint_every=1000,
        ),
        "gpt2-small": _gpt2("gpt2-small", layers=12, heads=12, width=768),
        "gpt2-medium": _gpt2("gpt2-medium", layers=24, heads=16, width=1024),
        "gpt2-xl": _gpt2("gpt2-xl", layers=48, heads=25, width=1600),
        # Shape of Llama 2 7B (arXiv:2307.09288).
        "llama-7b": TrainConfig(
            preset="llama-7b",
            gpt=GPTConfig(
                vocab=32000,
                layers=32,
                heads=32,
                width=4096,
                ffn=11008,
                context=4096,
                tie_head=False,
                remat="full",
                dtype="bfloat16",
            ),
            optimizer=OptimizerConfig(learning_rate=3e-4, min_learning_rate=3e-5, warmup_steps=2000),
            steps=100_000,
            batch_size=512,
            microbatches=2,
            eval_every=1000,
            checkpoint_every=1000,
        ),
    }
)


def preset(name: str) -> TrainConfig:
    """Return the settings of a preset.

    Raises:
        ConfigError: The preset is unknown.
    """
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}{suggestion(name, PRESETS)}")
    return PRESETS[name]
