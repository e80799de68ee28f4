"""Adds adapters to the weights of a `Decoder`."""

from __future__ import annotations

import fnmatch
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from autoshard.errors import ConfigError
from autoshard.models.adapters.lora_config import LoraConfig
from autoshard.models.adapters.rows import BASE, MAGNITUDES, A, B, takes_adapter, within_layer
from autoshard.models.decoder.adapted import Adapted, column_norms
from autoshard.models.decoder.decoder import Decoder
from autoshard.models.decoder.quantized_weight import QuantizedWeight, quantized
from autoshard.models.pretrained.families.family import Family
from autoshard.models.pretrained.parameter_paths import owner_of, parameters_of
from autoshard.models.pretrained.quantized.kept_codes import weight_shapes
from autoshard.models.pretrained.tables import Source, sources_of

trained_parameters = (f"*/{A}", f"*/{B}", f"*/{MAGNITUDES}")
"""Globs over the paths of the parameters of adapters, which are trained while all others are frozen."""


def add_adapters(model: Decoder, family: Family, lora: LoraConfig, key: jax.Array) -> None:
    """Add an adapter to each matrix that a target matches. Unless they are quantized, the model computes as before.

    The first factor is drawn from a uniform distribution with variance 1 / (3 in), as PEFT does; the second is zero.
    The magnitudes of DoRA are the norms of the weight. All are float32.

    Args:
        model: the model, which is changed.
        family: its family, which says what tensor each weight is.
        lora: the settings, with a rank.
        key: random key.

    Raises:
        ConfigError: a glob matches no matrix, or one that cannot have an adapter, or one that is quantized already and
            is to be quantized.
    """
    shapes = weight_shapes(model)
    table = family.table(model.cfg)
    sources = sources_of(family.stacks(model.cfg), table, shapes)
    for path in targets_of({path: table[within_layer(path)] for path in shapes}, sources, lora.targets):
        own = jax.random.fold_in(key, zlib.crc32(path.encode()))
        parent, name = owner_of(model, path)
        if lora.quantize != "none" and isinstance(getattr(parent, name), QuantizedWeight):
            raise ConfigError(f"lora.quantize is {lora.quantize!r}, but {path} is quantized already: leave it out")
        weight = getattr(parent, name)[...] if lora.dora else None
        magnitudes = None if weight is None else initial_magnitudes(weight, sources[path])
        adapt(model, path, *_new_factors(sources[path], lora.rank, own), lora.scale, magnitudes)
        if lora.quantize != "none":
            getattr(parent, name).base = quantize_weight(parameters_of(model)[f"{path}/{BASE}"], sources[path], lora)


def targets_of(rows: Mapping[str, Any], sources: Mapping[str, Source], globs: Sequence[str]) -> list[str]:
    """Return the paths of the matrices that globs match.

    Raises:
        ConfigError: a glob matches no matrix, or one that cannot have an adapter.
    """

    def matched(path: str, glob: str) -> bool:
        return any(fnmatch.fnmatchcase(name, glob) for name in (path, within_layer(path)))

    possible = [path for path, row in rows.items() if takes_adapter(row)]
    others = [path for path in rows if path not in possible and len(sources[path].tensor_shape) > 1]
    known = ", ".join(dict.fromkeys(within_layer(path) for path in possible))
    for glob in globs:
        if wrong := [within_layer(path) for path in others if matched(path, glob)]:
            raise ConfigError(
                f"--lora.targets {glob!r} matches {wrong[0]}, which cannot have an adapter; those that can are {known}"
            )
        if not any(matched(path, glob) for path in possible):
            raise ConfigError(f"--lora.targets {glob!r} matches no matrix; those that can have an adapter are {known}")
    return [path for path in possible if any(matched(path, glob) for glob in globs)]


def _new_factors(source: Source, rank: int, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape, leading = source.shape, source.leading
    count = leading + len(source.layout.groups[1])
    stacked, inputs, outputs = shape[:leading], shape[leading:count], shape[count:]
    bound = 1.0 / math.sqrt(math.prod(inputs))
    a = jax.random.uniform(key, (*stacked, *inputs, rank), jnp.float32, -bound, bound)
    return a, jnp.zeros((*stacked, rank, *outputs), jnp.float32)


def initial_magnitudes(weight: jax.Array, source: Source) -> jax.Array:
    """Return the magnitudes with which an adapter of DoRA leaves a weight as it is."""
    return column_norms(weight, source.leading, len(source.layout.groups[1]))


def quantize_weight(weight: jax.Array, source: Source, lora: LoraConfig) -> QuantizedWeight:
    """Return a weight in the format of the settings."""
    inputs = len(source.layout.groups[1])
    both = quantized(weight, lora.quantize, source.leading, inputs)
    return QuantizedWeight(*both, lora.quantize, inputs, weight.ndim - source.leading - inputs)


def adapt(
    model: Decoder, path: str, a: jax.Array, b: jax.Array, scale: float, magnitudes: jax.Array | None = None
) -> None:
    """Give the weight with this path an adapter with these factors, and with these magnitudes if it is one of DoRA."""
    parent, name = owner_of(model, path)
    setattr(parent, name, Adapted(getattr(parent, name), a, b, scale, magnitudes))


def without_adapters(model: Decoder) -> Decoder:
    """Return a model of the same weights without its adapters."""
    graph, state = nnx.split(model)
    plain = nnx.merge(graph, state)
    places = ["/".join(map(str, path)) for path, node in nnx.iter_graph(plain) if isinstance(node, Adapted)]
    for path in places:
        parent, name = owner_of(plain, path)
        setattr(parent, name, getattr(parent, name).base)
    return plain
