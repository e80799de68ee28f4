"""One layer of a `Decoder`, and the layers of one repetition of a segment."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from autoshard.models.decoder.cache import Kept, Rows
from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.decoder.experts import Experts, Load
from autoshard.models.decoder.kinds import LayerKind
from autoshard.models.decoder.latent_attention import LatentAttention
from autoshard.models.decoder.layer_inputs import LayerGate
from autoshard.models.decoder.layers import MLP, Attention, Norm, Sides
from autoshard.models.remat.named_values import named
from autoshard.models.scopes import scoped
from autoshard.models.stack import run_layers

Carry = jax.Array | tuple[jax.Array, Load]


class Block(nnx.Module):
    """One layer: attention, then the MLP or the experts, each normalised before and added to the residual stream."""

    def __init__(self, cfg: DecoderConfig, kind: LayerKind, key: jax.Array):
        attention_key, mlp_key = jax.random.split(key)
        self.attention_norm, self.mlp_norm = Norm(cfg, cfg.width), Norm(cfg, cfg.width)
        attention = Attention if cfg.latent is None else LatentAttention
        self.attention = attention(cfg, kind, attention_key)
        self.mlp = None if kind.experts else MLP(cfg, mlp_key, kind.ffn)
        self.experts = Experts(cfg, mlp_key) if kind.experts else None
        self.attention_post_norm = Norm(cfg, cfg.width) if cfg.post_norms else None
        self.mlp_post_norm = Norm(cfg, cfg.width) if cfg.post_norms else None
        self.gate = None if cfg.layer_inputs is None else LayerGate(cfg, jax.random.fold_in(mlp_key, 1))
        # The factor is stored but not trained: its gradient is 0.
        self.scale = nnx.Variable(jnp.ones((1,), jnp.dtype(cfg.param_dtype))) if cfg.layer_scale else None

    def __call__(self, carry: Carry, inputs: jax.Array | None, sides: Sides) -> Carry:
        """Apply the layer to `[batch, seq, width]`, or to that array and the load of the experts so far.

        `inputs [batch, seq, ...]` are the vectors of `LayerInputs` for this layer; None in a model without them.
        """
        return self.with_keys(carry, inputs, sides)[0]

    def with_keys(self, carry: Carry, inputs: jax.Array | None, sides: Sides) -> tuple[Carry, Kept]:
        """Apply the layer. Also returns the keys and values of its attention, for layers that borrow them."""
        x, load = carry if isinstance(carry, tuple) else (carry, None)
        x = named(x, "residual")
        y = scoped("attention_norm", self.attention_norm, x)
        y, keys = scoped("attention", self.attention.with_keys, y, sides)
        x = x + self._post("attention_post_norm", y)
        y = scoped("mlp_norm", self.mlp_norm, x)
        if load is not None and self.experts is not None:
            y, more = scoped("experts", self.experts.with_load, y)
            load = load.plus(more)
        else:
            y = self.feed_forward(y)
        x = self._ended(x + self._post("mlp_post_norm", y), inputs)
        return (x if load is None else (x, load)), keys

    def _ended(self, x: jax.Array, inputs: jax.Array | None) -> jax.Array:
        """Add the layer's vectors `inputs` through its gate, and scale the result."""
        if self.gate is not None:
            assert inputs is not None
            x = scoped("gate", self.gate, x, inputs)
        return x if self.scale is None else x * lax.stop_gradient(self.scale[...]).astype(x.dtype).reshape(1, 1, 1)

    def extend(
        self, x: jax.Array, inputs: jax.Array | None, sides: Sides, kept: Kept, rows: Rows
    ) -> tuple[jax.Array, Kept]:
        """Apply the layer to new positions, using what it has kept of earlier ones."""
        y = scoped("attention_norm", self.attention_norm, x)
        y, kept = scoped("attention", self.attention.extend, y, sides, kept, rows)
        x = x + self._post("attention_post_norm", y)
        y = self.feed_forward(scoped("mlp_norm", self.mlp_norm, x))
        return self._ended(x + self._post("mlp_post_norm", y), inputs), kept

    def _post(self, name: str, y: jax.Array) -> jax.Array:
        """Apply the norm of this name after a part of the layer, if there is one."""
        norm = getattr(self, name)
        return y if norm is None else scoped(name, norm, y)

    def feed_forward(self, x: jax.Array) -> jax.Array:
        """Apply the MLP or the experts."""
        if self.experts is not None:
            return scoped("experts", self.experts, x)
        assert self.mlp is not None
        return scoped("mlp", self.mlp, x)


class Group(nnx.Module):
    """The layers of one repetition of a segment's pattern."""

    def __init__(self, cfg: DecoderConfig, pattern: Sequence[LayerKind], key: jax.Array):
        keys = jax.random.split(key, len(pattern))
        self.remat = cfg.remat
        self.layers = nnx.List([Block(cfg, kind, each) for kind, each in zip(pattern, keys, strict=True)])

    def __call__(self, x: Carry, inputs: jax.Array | None, sides: Sides) -> Carry:
        """Apply the layers to `[batch, seq, width]`, with the load of the experts if it is given.

        Several layers are rematerialized one by one, and `inputs` is `[layers, batch, seq, ...]`. For one layer, it is
        `[batch, seq, ...]`.
        """
        if len(self.layers) == 1:
            return self.layers[0](x, inputs, sides)
        return run_layers(self.layers, x, inputs, remat=self.remat, sides=(sides,))

    def kept(self, batch: int, length: int) -> tuple[Kept, ...]:
        """Return the empty slots of each layer."""
        return tuple(layer.attention.kept(batch, length) for layer in self.layers)

    def extend(
        self, x: jax.Array, inputs: jax.Array | None, sides: Sides, kept: tuple[Kept, ...], rows: Rows
    ) -> tuple[jax.Array, tuple[Kept, ...]]:
        """Apply the layers to new positions."""
        after = []
        for number, (layer, own) in enumerate(zip(self.layers, kept, strict=True)):
            its = inputs if inputs is None or len(self.layers) == 1 else inputs[number]
            x, own = layer.extend(x, its, sides, own, rows)
            after.append(own)
        return x, tuple(after)
