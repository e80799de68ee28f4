"""A config as JSON, in a run's folder and in checkpoints, and the settings that a resumed run may change."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from autoshard.train.config.merging import merge
from autoshard.train.config.train_config import TrainConfig

RESUMABLE_CHANGES = frozenset(
    "preset config run_dir resume steps mesh target memory_limit_bytes plan measure variants offload compiler_options "
    "gather kernels overlap profile schedule virtual_devices log_every metrics eval_every eval_batches "
    "checkpoint_every checkpoint_minutes keep_checkpoints keep_best keep_every sample_tokens prompt prefetch use_ema "
    "guard deadline_seconds allow_other_data resume_if_started max_failures".split()
)
"""Settings that may change when a run is resumed. All others define what is trained and on which data."""


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """Return the config as JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def from_dict(values: Mapping[str, Any], where: str) -> TrainConfig:
    """Return the config that `to_dict` wrote."""
    return merge(TrainConfig(), values, where)


def identity(config: TrainConfig) -> dict[str, Any]:
    """Return the settings that must not change when a run is resumed."""
    return {name: value for name, value in to_dict(config).items() if name not in RESUMABLE_CHANGES}


def checkpoint_config(config: TrainConfig) -> dict[str, Any]:
    """Return the config stored in a checkpoint: `model` must match on restore, `run` is information only."""
    values = identity(config)
    shape = values["gpt"] if config.pretrained.folder is None else {"lora": lora_shape(values["lora"])}
    return {"model": {"name": config.model_name, **shape}, "run": values}


LATER_LORA = ("dora", "quantize")


def lora_shape(lora: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of adapters that a checkpoint must match. Older checkpoints do not name the later ones."""
    kept = {name: value for name, value in lora.items() if name != "path"}
    return {name: value for name, value in kept.items() if name not in LATER_LORA or value not in (False, "none")}
