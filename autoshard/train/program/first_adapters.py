"""The adapters that a run starts with: their settings, and first values that are read or computed, not drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from autoshard.errors import ConfigError
from autoshard.models.adapters import LoraConfig
from autoshard.models.adapters.insert import initial_magnitudes, quantize_weight
from autoshard.models.adapters.peft_files import adapter_values
from autoshard.models.adapters.rows import BASE, MAGNITUDES, A, B
from autoshard.models.pretrained.load import Described
from autoshard.models.pretrained.tables import Source
from autoshard.train.config import run_directory
from autoshard.train.config.stored_config import from_dict
from autoshard.train.config.train_config import TrainConfig

CODES, SCALE = "codes", "scale"  # the parameters of a `QuantizedWeight`
_OF_ADAPTER = ("rank", "alpha", "targets", "rslora", "dora")  # settings that the folder of an adapter has


def with_adapter_settings(config: TrainConfig, described: Described) -> TrainConfig:
    """Return the config with the settings of the adapter that `lora.path` names.

    Those of a resumed run are stored in its folder, so it does not need the adapter's.

    Raises:
        AutoshardError: there is no adapter, it is for another model, or a setting that is given is not the adapter's.
    """
    if config.lora.path is None:
        return config
    if config.resume and config.run_dir is not None:
        stored = from_dict(run_directory.read_config(config.run_dir), str(config.run_dir)).lora
        if stored.path != config.lora.path:
            return config
        _check_given(config.lora, stored)
        return replace(config, lora=stored)
    shapes = {path: leaf.shape for path, leaf in described.shapes.items()}
    lora, _ = adapter_values(config.lora.path, described.family, described.cfg, shapes)
    _check_given(config.lora, lora)
    return replace(config, lora=replace(lora, path=config.lora.path, quantize=config.lora.quantize))


def _check_given(given: LoraConfig, found: LoraConfig) -> None:
    """Check that settings which are given besides an adapter's folder are those of the adapter.

    Raises:
        ConfigError: some are not; the message names them.
    """
    default = LoraConfig()
    others = [
        f"lora.{name} is {value!r}, but the adapter has {getattr(found, name)!r}"
        for name in _OF_ADAPTER
        if (value := getattr(given, name)) not in (getattr(default, name), getattr(found, name))
    ]
    if others:
        raise ConfigError(f"{'; '.join(others)}: leave out what the adapter in {str(given.path)!r} has itself")


def adapter_start(
    config: TrainConfig,
    described: Described,
    leaves: Mapping[str, Any],
    sources: Mapping[str, Source],
    values: Mapping[str, jax.Array],
) -> dict[str, jax.Array]:
    """Return first values of adapters: those of a folder, or the magnitudes of DoRA; by path, on their shards.

    Args:
        config: The run.
        described: Its model.
        leaves: Shape, dtype and sharding of each parameter, by path.
        sources: The tensors of each pretrained parameter.
        values: Their values.

    Raises:
        AutoshardError: The folder of the adapter is missing or damaged, or for another model.
    """
    if config.lora.path is not None:
        shapes = {path: leaf.shape for path, leaf in described.shapes.items()}
        _, found = adapter_values(config.lora.path, described.family, described.cfg, shapes)
        whole = {
            f"{path}/{name}": value
            for path, parts in found.items()
            for name, value in zip((A, B, MAGNITUDES), parts, strict=False)
        }
        return {
            path: jax.make_array_from_callback(value.shape, leaves[path].sharding, lambda index, x=value: x[index])
            for path, value in whole.items()
        }
    bases = {path: path.removesuffix(MAGNITUDES) + BASE for path in leaves if path.endswith(f"/{MAGNITUDES}")}

    def magnitudes(values: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {path: initial_magnitudes(values[base], sources[base]) for path, base in bases.items()}

    given = {base: values[base] for base in bases.values()}
    return jax.jit(magnitudes, out_shardings={path: leaves[path].sharding for path in bases})(given) if bases else {}


def dense_shapes(described: Described, leaves: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes, before quantization, of the weights that are quantized when they are read; by path."""
    paths = [path.removesuffix(f"/{CODES}") for path in leaves if path.endswith(f"/{BASE}/{CODES}")]
    paths = [path for path in paths if path.removesuffix(f"/{BASE}") not in described.kept]
    return {path: described.shapes[path.removesuffix(f"/{BASE}")].shape for path in paths}


def quantized_values(
    lora: LoraConfig, path: str, weight: jax.Array, source: Source, leaves: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Quantize a weight onto its shards; returns its codes and scales by path. The weight's own memory is freed."""
    names = (f"{path}/{CODES}", f"{path}/{SCALE}")

    def made(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = quantize_weight(weight, source, lora)
        return found.codes[...], found.scale[...]

    values = jax.jit(made, out_shardings=tuple(leaves[name].sharding for name in names))(weight)
    jax.block_until_ready(values)
    weight.delete()
    return dict(zip(names, values, strict=True))
