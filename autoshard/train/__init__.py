"""The trainer: its config, data, model, plan and training loop, and the files of a run.

Public names are imported on first use, so that the command line can configure devices before JAX starts. `__init__.pyi`
declares them for type checkers.
"""

from __future__ import annotations

from autoshard._first_use import on_first_use

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

__getattr__, __dir__ = on_first_use(__name__, _MODULES)
