"""The model of a run that started from a pretrained folder, with its adapters, for generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from autoshard._shown import shown
from autoshard.ckpt import Checkpointer
from autoshard.errors import ConfigError
from autoshard.models.decoder.decoder import Decoder
from autoshard.models.pretrained.parameter_paths import as_tree, by_path
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.inference.saved_parameters import StepParameters
from autoshard.train.program.pretrained import pretrained_builder
from autoshard.train.step.preference import REFERENCE


@shown
@dataclass(frozen=True)
class RunModel:
    """A run's model without its values.

    Attributes:
        model: the model, with shapes in place of values.
        graph: its structure.
        shapes: the shapes of its parameters, nested dictionaries.
        parameters: loads them with the shardings of a tree of shapes.
    """

    model: Any
    graph: Any
    shapes: Any
    parameters: StepParameters

    @property
    def source(self) -> str:
        """Where the parameters come from: the checkpoint folder, the step, and whether they are moving averages."""
        own = self.parameters
        step = own.checkpoints.latest() if own.step is None else own.step
        return f"{own.checkpoints.directory}, step {step}, use_ema {own.use_ema}"

    def read(self, shardings: Mapping[str, Any]) -> Decoder:
        """Load the model with the given sharding of each parameter, by path."""
        placed = {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[path])
            for path, leaf in by_path(self.shapes).items()
        }
        return nnx.merge(self.graph, self.parameters(as_tree(placed)))


def open_run_model(
    config: TrainConfig, checkpoints: Path, step: int | None = None, use_ema: bool | None = None
) -> RunModel:
    """Open the model of a run.

    Args:
        config: The run.
        checkpoints: The folder of its checkpoints.
        step: The step to load; by default the newest intact one.
        use_ema: Whether to use the moving average of the parameters; by default as the run's evaluation did.

    Raises:
        AutoshardError: There is no checkpoint, or not this step.
    """
    opened = Checkpointer(checkpoints, keep=None)
    if not opened.steps():
        raise ConfigError(f"{str(checkpoints)!r} has no checkpoint yet: wait for the first save")
    if step is not None:
        opened.describe(step)
    build = pretrained_builder(config)
    model: Any = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    if hasattr(model, REFERENCE):  # the frozen copy of preference training generates nothing
        delattr(model, REFERENCE)
    graph, state = nnx.split(model)
    averages = bool(config.ema_decay) and config.use_ema if use_ema is None else use_ema
    parameters = StepParameters(opened, step, averages, or_parameters=use_ema is None)
    return RunModel(model, graph, nnx.to_pure_dict(state), parameters)
