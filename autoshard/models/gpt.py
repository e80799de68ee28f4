"""A decoder-only transformer in Flax NNX, written for one device.

    x = embed(tokens) [+ position]
    x = x + attention(norm(x)); x = x + mlp(norm(x))        for each layer
    logits = norm(x) @ head

The layers are `transformer.Block`s. They are either a list, or one `Block` whose parameters are stacked on a leading
`layers` dimension and which runs in a scan. Both compute the same values; `restack` converts between them. The head may
share the embedding's parameter. There are no sharding annotations here: `auto_shard` finds the shardings.

Parameters are the model's only state. Dropout splits the key of the call, one part for each layer, so that the masks do
not depend on the mesh, on the remat policy, or on whether the layers are scanned.

Sources: GPT-2 (Radford et al. 2019) and nanoGPT for shapes and initialization.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from autoshard.models.gpt_config import GPTConfig
from autoshard.models.scopes import scoped
from autoshard.models.stack import extend_layers, make_layers, run_layers
from autoshard.models.transformer import (
    Block,
    KVCache,
    Norm,
    dropout,
    dropout_keys,
    embed_tokens,
    param,
    predict,
    prediction_loss,
)


class GPT(nnx.Module):
    """A decoder-only transformer: maps `[batch, seq]` tokens to `[batch, seq, vocab]` logits.

    Args:
        cfg: shape and numerics of the model.
        rngs: its `params` stream initializes the parameters. They are normal with standard deviation 0.02, or
            0.02 / sqrt(2 * layers) for the two projections of each layer that add to the residual stream.

    >>> model = GPT(GPTConfig(layers=1, width=8, heads=2), rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((2, 5), jnp.int32)).shape
    (2, 5, 256)
    """

    def __init__(self, cfg: GPTConfig, *, rngs: nnx.Rngs):
        self.cfg = cfg
        embed_key, position_key, head_key, blocks_key = jax.random.split(rngs.params(), 4)
        learned, own_head = cfg.positions == "learned", not cfg.tie_head
        self.embed = param(embed_key, cfg, (cfg.vocab, cfg.width), 0.02)
        self.position = param(position_key, cfg, (cfg.context, cfg.width), 0.02) if learned else None
        blocks_keys = jax.random.split(blocks_key, cfg.layers)
        self.blocks = make_layers(lambda key: Block(cfg, key), blocks_keys, scan=cfg.scan_layers)
        self.norm = Norm(cfg)
        self.head = param(head_key, cfg, (cfg.width, cfg.vocab), 0.02) if own_head else None

    def __call__(
        self, tokens: jax.Array, *, deterministic: bool = True, rngs: nnx.Rngs | jax.Array | None = None
    ) -> jax.Array:
        """Compute the logits of each position's next token.

        Args:
            tokens: integers `[batch, seq]`, seq at most `cfg.context`. A token outside the vocabulary gives NaNs.
            deterministic: whether dropout is off.
            rngs: source of the dropout key: an `nnx.Rngs` (its `dropout` stream) or a key.

        Returns:
            `[batch, seq, vocab]` in `cfg.dtype`.
        """
        return predict(self._features(tokens, deterministic, rngs), self.embed, self.head)

    def loss(
        self,
        batch: Mapping[str, jax.Array],
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Compute the cross-entropy of a batch, with logits in `cfg.loss_chunks` chunks.

        A subclass that computes other logits overrides this method and `__call__`.

        Args:
            batch: `inputs` and `targets`, integers `[batch, seq]`, and optionally `mask`, weights `[batch, seq]`.
            deterministic: whether dropout is off.
            rngs: source of the dropout key, as in a call.

        Returns:
            The loss in nats, summed over tokens, and the number of tokens, both float32 `[]`.
        """
        x = self._features(batch["inputs"], deterministic, rngs)
        return prediction_loss(self.cfg, x, self.embed, self.head, batch["targets"], batch.get("mask"))

    def _features(self, tokens: jax.Array, deterministic: bool, rngs: nnx.Rngs | jax.Array | None) -> jax.Array:
        """Compute the features `[batch, seq, width]` of which the logits are a linear function."""
        keys = dropout_keys(self.cfg, deterministic, rngs)
        x = embed_tokens(self.cfg, self.embed, self.position, tokens)
        if keys is not None:
            x, keys = dropout(x, self.cfg.dropout, keys[0]), keys[1:]
        return scoped("norm", self.norm, scoped("layers", run_layers, self.blocks, x, keys, remat=self.cfg.remat))

    def cache(self, batch: int, length: int | None = None) -> KVCache:
        """Make an empty cache for the keys and values of `length` positions, `cfg.context` by default."""
        cfg = self.cfg
        shape = (cfg.layers, batch, cfg.context if length is None else length, cfg.key_heads, cfg.head_dim)
        empty = jnp.zeros(shape, cfg.dtype)
        return KVCache((empty, empty), jnp.zeros((), jnp.int32))

    def extend(self, tokens: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Compute the logits of tokens that follow those in the cache, without recomputing the earlier positions.

        Args:
            tokens: integers `[batch, seq]`. Together with the cached positions, they must fit into the cache.
            cache: from `cache`, or from the previous call.

        Returns:
            Logits `[batch, seq, vocab]`, equal to those of a call on the whole sequence, and the extended cache.
        """
        start = cache.length
        x = embed_tokens(self.cfg, self.embed, self.position, tokens, start)
        x, keys_values = scoped(
            "layers", extend_layers, self.blocks, x, cache.kept, lambda layer, x, cached: layer.extend(x, cached, start)
        )
        logits = predict(scoped("norm", self.norm, x), self.embed, self.head)
        return logits, KVCache(keys_values, start + jnp.int32(tokens.shape[1]))


def restack(model: GPT, scan_layers: bool) -> GPT:
    """Copy a model with its layers either stacked for a scan or as a list.

    Args:
        model: any `GPT`.
        scan_layers: whether the result's layers are stacked and scanned.

    Returns:
        A model that computes the same values as `model`.
    """
    cfg = dataclasses.replace(model.cfg, scan_layers=scan_layers)
    graph, state = nnx.split(nnx.eval_shape(lambda: GPT(cfg, rngs=nnx.Rngs(0))))
    values = nnx.to_pure_dict(nnx.state(model))
    if model.cfg.scan_layers and not scan_layers:
        stacked = values["blocks"]
        values["blocks"] = {i: jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(cfg.layers)}
    elif scan_layers and not model.cfg.scan_layers:
        layers = [values["blocks"][i] for i in range(cfg.layers)]
        values["blocks"] = jax.tree.map(lambda *xs: jnp.stack(xs), *layers)
    nnx.replace_by_pure_dict(state, values)
    return nnx.merge(graph, state)


def loss_fn(
    model: GPT,
    tokens: jax.Array,
    targets: jax.Array,
    mask: jax.Array | None = None,
    *,
    deterministic: bool = True,
    rngs: nnx.Rngs | jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the cross-entropy of the model's logits, summed over tokens, and the number of tokens."""
    batch = {"inputs": tokens, "targets": targets} | ({} if mask is None else {"mask": mask})
    return model.loss(batch, deterministic=deterministic, rngs=rngs)


def parameter_count(model: GPT) -> int:
    """Count the parameters. A tied head is counted once."""
    return sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
