"""The trainer: its config, data, model, plan and training loop, and the files of a run.

Public names are imported on first use, so that the command line can configure devices before JAX starts. `__init__.pyi`
declares them for type checkers.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "Result": "run.loop",
    "TextGenerator": "inference.exported_model",
    "TrainConfig": "config.train_config",
    "Trained": "inference.trained_model",
    "Trainer": "run.loop",
    "load_trained": "inference.trained_model",
    "open_generator": "inference.exported_model",
    "train": "run.loop",
}

__all__ = [*_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'autoshard.train' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"autoshard.train.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
