"""Vectors that each layer looks up by token and adds to the residual stream through a gate (Gemma 4).

    inputs[l] = (embed[token, l] sqrt(w) + norm(x embedding . projection[l] / sqrt(width))) / sqrt(2)
    x         = x + norm(activation(x gate) * inputs[l] . up)            at the end of layer l

where w is the size of a vector. The vectors of a token for all layers are one row of a table, so they are looked up
once, before the layers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.decoder.layers import ACTIVATIONS, Norm, normal
from autoshard.models.decoder.quantized_weight import project


class LayerInputs(nnx.Module):
    """Computes the vectors of all layers.

    Parameters: `embed [vocab, layers, w]`, `projection [width, layers, w]`, and the scale of a norm, `[w]`.
    """

    def __init__(self, cfg: DecoderConfig, key: jax.Array):
        assert cfg.layer_inputs is not None
        own, (embed_key, projection_key) = cfg.layer_inputs, jax.random.split(key)
        self.embed = normal(embed_key, cfg, own.vocab, cfg.layers, own.width)
        self.projection = normal(projection_key, cfg, cfg.width, cfg.layers, own.width)
        self.norm = Norm(cfg, own.width)

    def __call__(self, tokens: jax.Array, x: jax.Array) -> jax.Array:
        """Return the vectors `[layers, batch, seq, w]` of tokens `[batch, seq]` embedded as `x [batch, seq, width]`."""
        # `fill` without wrapping: an id outside the vocabulary gives NaN instead of another token's row.
        own = self.embed[...].at[tokens].get(mode="fill", wrap_negative_indices=False).astype(x.dtype)
        own = own * jnp.asarray(own.shape[-1] ** 0.5, x.dtype)
        context = jnp.einsum("bse,elw->bslw", x, self.projection[...].astype(x.dtype))
        context = self.norm(context * jnp.asarray(x.shape[-1] ** -0.5, x.dtype))
        return jnp.moveaxis((own + context) * jnp.asarray(2**-0.5, x.dtype), 2, 0)


class LayerGate(nnx.Module):
    """Adds a layer's vectors to the residual stream.

    Parameters: `w_gate [width, w]`, `w_up [w, width]`, and the scale of a norm, `[width]`.
    """

    def __init__(self, cfg: DecoderConfig, key: jax.Array):
        assert cfg.layer_inputs is not None
        gate_key, up_key = jax.random.split(key)
        self.activation = cfg.activation
        self.w_gate = normal(gate_key, cfg, cfg.width, cfg.layer_inputs.width)
        self.w_up = normal(up_key, cfg, cfg.layer_inputs.width, cfg.width)
        self.norm = Norm(cfg, cfg.width)

    def __call__(self, x: jax.Array, inputs: jax.Array) -> jax.Array:
        """Return `[batch, seq, width]` with the gated vectors `[batch, seq, w]` added."""
        gate = ACTIVATIONS[self.activation](project("bse,ew->bsw", x, self.w_gate))
        return x + self.norm(project("bsw,we->bse", gate * inputs, self.w_up))
