"""The layers of a model as segments: made from a config, and run in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from autoshard.models.decoder.block import Block, Carry, Group
from autoshard.models.decoder.cache import Kept
from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.decoder.layers import Sides
from autoshard.models.decoder.positions.chunks import chunk_segments
from autoshard.models.decoder.segments import Segment, segments_of
from autoshard.models.scopes import scoped
from autoshard.models.stack import make_layers, run_layers


def make_segments(cfg: DecoderConfig, key: jax.Array) -> nnx.List:
    """Make the layers of each segment: one `Group` with stacked parameters, or a list of groups."""
    segments = segments_of(cfg.kinds)
    keys = jax.random.split(key, len(segments))
    return nnx.List(
        [
            make_layers(
                lambda key, pattern=segment.pattern: Group(cfg, pattern, key),
                jax.random.split(key, segment.repeats),
                scan=cfg.scan_layers and segment.repeats > 1,
            )
            for segment, key in zip(segments, keys, strict=True)
        ]
    )


def run_segments(cfg: DecoderConfig, segments: nnx.List, x: Any, sides: Sides, inputs: jax.Array | None = None) -> Any:
    """Apply all layers to `[batch, seq, width]`, or to that array and the load of the experts so far.

    `inputs [layers, batch, seq, ...]` are the vectors of `LayerInputs`; None in a model without them.
    """
    for segment, layers in zip(segments_of(cfg.kinds), segments, strict=True):
        own = segment_inputs(segment, inputs)
        if name := segment.pattern[0].lends:
            # The kind of a layer that lends occurs once, so the layer is alone in its segment.
            lenders, options = nnx.List([Lender(layers[0].layers[0])]), {"remat": cfg.remat, "sides": (sides,)}
            x, lent = scoped("layers", run_layers, lenders, (x, ()), own, **options)
            sides = sides.lending(name, lent)
            continue
        # A group of several layers rematerializes each of them.
        remat = cfg.remat if len(segment.pattern) == 1 else "none"
        x = scoped("layers", run_layers, layers, x, own, remat=remat, sides=(sides,))
    return x


class Lender(nnx.Module):
    """Wraps a layer to return its keys and values as the second part of the carry."""

    def __init__(self, layer: Block):
        self.layer = layer

    def __call__(self, carry: tuple[Carry, Kept], inputs: jax.Array | None, sides: Sides) -> tuple[Carry, Kept]:
        """Apply the layer to the first part of the carry."""
        return self.layer.with_keys(carry[0], inputs, sides)


def segment_inputs(segment: Segment, inputs: jax.Array | None) -> jax.Array | None:
    """Return the inputs of a segment's layers: `[repeats, ...]`, or `[repeats, layers, ...]` for a longer pattern."""
    if inputs is None:
        return None
    count = len(segment.pattern)
    own = inputs[segment.first : segment.first + segment.repeats * count]
    return own if count == 1 else own.reshape(segment.repeats, count, *own.shape[1:])


def make_sides(
    cfg: DecoderConfig,
    positions: jax.Array,
    segment_ids: jax.Array | None,
    region_ids: jax.Array | None = None,
    chunks: Mapping[int, jax.Array] | None = None,
) -> Sides:
    """Return the inputs that all layers share, besides the residual stream."""
    kinds = dict.fromkeys((kind.rotary, cfg.rotary_dims(kind)) for kind in cfg.kinds if kind.rotary is not None)
    tables = {(rotary, dims): rotary.table(dims, positions) for rotary, dims in kinds}
    temperatures = dict.fromkeys(kind.temperature for kind in cfg.kinds if kind.temperature is not None)
    factors = {temperature: temperature.factors(positions) for temperature in temperatures}
    return Sides(tables, segment_ids, region_ids, factors, chunks or {})


def chunks_of(
    cfg: DecoderConfig, tokens: jax.Array, positions: jax.Array | None, segment_ids: jax.Array | None
) -> dict[int, jax.Array]:
    """Return the chunks of tokens `[batch, seq]`, for each size of chunks of the layers; see `chunk_segments`."""
    sizes = [kind.chunk for kind in cfg.kinds if kind.chunk is not None]
    return chunk_segments(sizes, (tokens.shape[0], tokens.shape[1]), positions, segment_ids, cfg.context)
