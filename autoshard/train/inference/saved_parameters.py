"""Load the parameters of a model that was saved or exported."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from safetensors import SafetensorError

from autoshard._columns import listing
from autoshard._shown import shown
from autoshard.ckpt import Checkpointer, CheckpointError, CheckpointWarning, DamagedCheckpointError, Description
from autoshard.ckpt.exchange import safetensors
from autoshard.ckpt.exchange.export import MODEL_PARTS
from autoshard.ckpt.exchange.schedule_free import B1, Z, schedule_free_path
from autoshard.errors import AutoshardError, ConfigError
from autoshard.train.step.schedule_free import evaluated_value


@shown
@dataclass(frozen=True)
class StepParameters:
    """The parameters of a step.

    Attributes:
        checkpoints: the checkpoints.
        step: step to load; None for the newest intact one.
        use_ema: whether to use the moving average of the parameters.
        or_parameters: whether to use the parameters themselves before the average's first update, as the run's
            evaluations do.
    """

    checkpoints: Checkpointer
    step: int | None
    use_ema: bool
    or_parameters: bool = False

    def __call__(self, like: Any) -> Any:
        """Load the parameters with the shardings of `like`; if no step was chosen, skip damaged ones."""
        read = partial(averaged_parameters, or_parameters=self.or_parameters) if self.use_ema else parameters
        if self.step is not None:
            return read(self.checkpoints, self.step, like)
        skipped: set[int] = set()
        while steps := sorted({*self.checkpoints.steps()} - skipped):
            try:
                return read(self.checkpoints, steps[-1], like)
            except DamagedCheckpointError as error:
                if len(steps) == 1:
                    raise
                warnings.warn(f"{error}\nAn earlier step is used instead.", CheckpointWarning, stacklevel=2)
            except CheckpointError:
                if steps[-1] in self.checkpoints.steps():  # otherwise a run in progress has removed it
                    raise
            skipped.add(steps[-1])
        raise ConfigError(f"all steps in {self.checkpoints.directory} were removed while they were read: try again")


@shown
@dataclass(frozen=True)
class ExportedParameters:
    """The parameters in the safetensors files of a folder, as `ckpt export` writes them."""

    folder: Path

    def __call__(self, like: Any) -> Any:
        """Load the parameters with the dtypes and shardings of `like`, with one of them in host memory at a time.

        Raises:
            ConfigError: the files are damaged, or are those of another model.
        """
        try:
            saved = {one.name: one for one in safetensors.read(self.folder)}
            leaves, tree = jax.tree_util.tree_flatten_with_path(like)
            named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
            if wrong := [*_differences(named, saved)]:
                raise ConfigError(
                    f"the tensors in {str(self.folder)!r} are not those of its model:\n{listing(wrong)}\n"
                    "Export the model again"
                )
            return tree.unflatten([_placed(saved[name], leaf) for name, leaf in named.items()])
        except AutoshardError:
            raise
        except (OSError, ValueError, SafetensorError) as error:
            raise ConfigError(f"the model in {str(self.folder)!r} cannot be read: {error}") from error


def has_exported(folder: Path) -> bool:
    """Return whether a folder has the tensors of an exported model."""
    return any(folder.glob("model*.safetensors"))


def _differences(named: Mapping[str, Any], saved: Mapping[str, safetensors.Tensor]) -> Iterator[str]:
    for name, leaf in named.items():
        if name not in saved:
            yield f"{name}: the files have no such tensor"
        elif saved[name].shape != leaf.shape:
            yield f"{name}: the files have {list(saved[name].shape)}, the model {list(leaf.shape)}"
    yield from (f"{name}: the model has no such parameter" for name in saved if name not in named)


def _placed(saved: safetensors.Tensor, like: Any) -> jax.Array:
    return jax.device_put(saved.read().astype(like.dtype), like.sharding)


def parameters(checkpoints: Checkpointer, step: int, like: Any) -> Any:
    """Load a step's parameters, frozen parameters and variables, with the shardings of `like`.

    Parameters that a schedule-free optimizer trained are its average; see `train.step.schedule_free`.

    Raises:
        CheckpointError: The parameters do not match the model, or are damaged.
    """
    description = checkpoints.describe(step)
    rename = _other_parts(description)
    leaves = {tuple(leaf.name.split("/")): leaf for leaf in description.leaves}
    free = schedule_free_path(leaves)
    if free is None:
        return checkpoints.restore(step, {"params": like}, partial=True, rename=rename)["params"]
    root = "/".join(free)
    flat, tree = jax.tree_util.tree_flatten_with_path(like)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]
    trained = [n for n, name in enumerate(names) if (*free, Z, *name.split("/")) in leaves]
    b1 = leaves[*free, B1]
    own = {n: leaf if n in trained else None for n, (_, leaf) in enumerate(flat)}
    template = {"params": like, "z": tree.unflatten(own.values()), "b1": jax.ShapeDtypeStruct((), b1.dtype)}
    rename |= {f"{root}/{Z}": "z", f"{root}/{B1}": "b1"}
    state = checkpoints.restore(step, template, partial=True, rename=rename)
    values = tree.flatten_up_to(state["params"])
    for n, z in zip(trained, jax.tree.leaves(state["z"]), strict=True):
        values[n] = evaluated_value(values[n], z, float(state["b1"]))
    return tree.unflatten(values)


def averaged_parameters(checkpoints: Checkpointer, step: int, like: Any, *, or_parameters: bool = False) -> Any:
    """Load the moving average of a step's parameters, with the dtypes and shardings of `like`.

    Args:
        checkpoints: the checkpoints.
        step: the step to load.
        like: the parameters' shapes, dtypes and shardings.
        or_parameters: load the parameters themselves if the average has no update yet.

    Raises:
        ConfigError: The step has no moving average.
    """
    description = checkpoints.describe(step)
    if not _has(description, "ema/mean"):
        raise ConfigError(f"step {step} in {checkpoints.directory} has no moving average: leave out --use-ema")
    rename = {"ema/mean": "params", "ema/weight": "weight", "params": "unread"}
    rename |= _other_parts(description)
    names = {leaf.name.removeprefix("ema/mean/") for leaf in description.leaves if leaf.name.startswith("ema/mean/")}

    def mean_like(path: Any, leaf: Any) -> Any:
        averages = jax.tree_util.keystr(path, simple=True, separator="/") in names
        return jax.ShapeDtypeStruct(leaf.shape, jnp.float32 if averages else leaf.dtype, sharding=leaf.sharding)

    template = {"params": jax.tree_util.tree_map_with_path(mean_like, like), "weight": jnp.float32(0)}
    state = checkpoints.restore(step, template, partial=True, rename=rename)
    weight = state["weight"]
    if not float(weight) > 0 and or_parameters:
        return parameters(checkpoints, step, like)
    if not float(weight) > 0:
        raise ConfigError(f"step {step} in {checkpoints.directory} has no moving average yet: leave out --use-ema")

    def corrected(path: Any, mean: Any, leaf: Any) -> Any:
        averages = jax.tree_util.keystr(path, simple=True, separator="/") in names
        return (mean / float(weight)).astype(leaf.dtype) if averages else mean

    return jax.tree_util.tree_map_with_path(corrected, state["params"], like)


def _other_parts(description: Description) -> dict[str, str]:
    """Map the other parts of the train state that belong to the model (`frozen`, `variables`) to `params`."""
    return {part: "params" for part in MODEL_PARTS if part != "params" and _has(description, part)}


def _has(description: Description, part: str) -> bool:
    return any(leaf.name.startswith(f"{part}/") for leaf in description.leaves)
