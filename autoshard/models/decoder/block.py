"""One layer of a `Decoder`, and the layers of one repetition of a segment."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from flax import nnx

from autoshard.models.decoder.cache import Kept, Rows
from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.decoder.experts import Experts, Load
from autoshard.models.decoder.kinds import LayerKind
from autoshard.models.decoder.latent_attention import LatentAttention
from autoshard.models.decoder.layers import MLP, Attention, Norm, Sides
from autoshard.models.remat.named_values import named
from autoshard.models.stack import run_layers

Carry = jax.Array | tuple[jax.Array, Load]


class Block(nnx.Module):
    """One layer: attention, then the MLP or the experts, each normalised before and added to the residual stream."""

    def __init__(self, cfg: DecoderConfig, kind: LayerKind, key: jax.Array):
        attention_key, mlp_key = jax.random.split(key)
        self.attention_norm, self.mlp_norm = Norm(cfg, cfg.width), Norm(cfg, cfg.width)
        attention = Attention if cfg.latent is None else LatentAttention
        self.attention = attention(cfg, kind, attention_key)
        self.mlp = None if kind.experts else MLP(cfg, mlp_key)
        self.experts = Experts(cfg, mlp_key) if kind.experts else None
        self.attention_post_norm = Norm(cfg, cfg.width) if cfg.post_norms else None
        self.mlp_post_norm = Norm(cfg, cfg.width) if cfg.post_norms else None

    def __call__(self, carry: Carry, key: jax.Array | None, sides: Sides) -> Carry:
        """Apply the layer to `[batch, seq, width]`, or to this and the load of the experts so far."""
        x, load = carry if isinstance(carry, tuple) else (carry, None)
        x = named(x, "residual")
        y = self.attention(self.attention_norm(x), sides)
        x = x + (y if self.attention_post_norm is None else self.attention_post_norm(y))
        if load is not None and self.experts is not None:
            y, more = self.experts.with_load(self.mlp_norm(x))
            load = load.plus(more)
        else:
            y = self.feed_forward(self.mlp_norm(x))
        x = x + (y if self.mlp_post_norm is None else self.mlp_post_norm(y))
        return x if load is None else (x, load)

    def extend(self, x: jax.Array, sides: Sides, kept: Kept, rows: Rows) -> tuple[jax.Array, Kept]:
        """Apply the layer to new positions, using what it has kept of earlier ones."""
        y, kept = self.attention.extend(self.attention_norm(x), sides, kept, rows)
        x = x + (y if self.attention_post_norm is None else self.attention_post_norm(y))
        y = self.feed_forward(self.mlp_norm(x))
        return x + (y if self.mlp_post_norm is None else self.mlp_post_norm(y)), kept

    def feed_forward(self, x: jax.Array) -> jax.Array:
        """Apply the MLP or the experts."""
        part = self.mlp if self.experts is None else self.experts
        assert part is not None
        return part(x)


class Group(nnx.Module):
    """The layers of one repetition of a segment's pattern."""

    def __init__(self, cfg: DecoderConfig, pattern: Sequence[LayerKind], key: jax.Array):
        keys = jax.random.split(key, len(pattern))
        self.remat = cfg.remat
        self.layers = nnx.List([Block(cfg, kind, each) for kind, each in zip(pattern, keys, strict=True)])

    def __call__(self, x: Carry, key: jax.Array | None, sides: Sides) -> Carry:
        """Apply the layers to `[batch, seq, width]`, with the load of the experts if it is given.

        If there are several, each is rematerialized on its own.
        """
        if len(self.layers) == 1:
            return self.layers[0](x, key, sides)
        return run_layers(self.layers, x, None, remat=self.remat, sides=(sides,))

    def kept(self, batch: int, length: int) -> tuple[Kept, ...]:
        """Return the empty slots of each layer."""
        return tuple(layer.attention.kept(batch, length) for layer in self.layers)

    def extend(
        self, x: jax.Array, sides: Sides, kept: tuple[Kept, ...], rows: Rows
    ) -> tuple[jax.Array, tuple[Kept, ...]]:
        """Apply the layers to new positions."""
        after = []
        for layer, own in zip(self.layers, kept, strict=True):
            x, own = layer.extend(x, sides, own, rows)
            after.append(own)
        return x, tuple(after)
