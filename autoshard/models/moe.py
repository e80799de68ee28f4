"""A decoder-only transformer with mixture-of-experts layers, in Flax NNX, written for one device.

    probability = softmax(x @ router)                            over experts, in float32
    y = sum over the top_k most probable experts of gate * expert(x)

Every `moe_every`-th layer is a mixture of experts. The other layers, the embedding, attention and the head are as in
`GPT`. A group of `moe_every` layers is the unit that is stacked, scanned and rematerialized.

Tokens are dispatched to experts in one of two ways.

- `capacity`: the tokens of a group of `group_size` compete for the `capacity` slots of each expert
  (`models.capacity`). A choice without a slot is dropped: that expert adds nothing, and a token without any slot keeps
  only its residual. If no layer keeps the experts' outputs for the backward pass, the gradient of the gates is a sum
  over hidden units. Otherwise it is a sum over outputs.
- `dropless`: tokens are sorted by expert, and each expert processes its own rows (`models.dropless`).

Two auxiliary losses, taken over all tokens of the batch and summed over layers, keep all experts in use and the logits
small. The balance loss is `experts * sum_e fraction_of_choices[e] * mean_probability[e]`, which is 1 if all experts are
chosen equally often. The z loss is `mean log(sum_e exp(logit[e]))^2`.

Sources: Shazeer et al. (arXiv:1701.06538); groups, capacity and the order of choices, GShard (arXiv:2006.16668);
balance loss, Switch Transformer (arXiv:2101.03961, equation 4); z loss, ST-MoE (arXiv:2202.08906, equation 5); no
dropping, MegaBlocks (arXiv:2211.15841); gates as a softmax over the chosen experts, Mixtral (arXiv:2401.04088); shared
experts, DeepSeekMoE (arXiv:2401.06066).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from autoshard._shown import shown
from autoshard.models import dropless
from autoshard.models.capacity import SLOTS, dispatch_masks, gated_outputs, one_hot
from autoshard.models.dropless.units import gelu, swiglu
from autoshard.models.moe_config import MoEConfig
from autoshard.models.quantized import quantized_einsum
from autoshard.models.remat.named_values import named
from autoshard.models.remat.policies import recomputes
from autoshard.models.scopes import scoped
from autoshard.models.stack import extend_layers, make_layers, run_layers
from autoshard.models.transformer import (
    MLP,
    Attention,
    Block,
    KeysValues,
    KVCache,
    Norm,
    dropout,
    dropout_add,
    dropout_keys,
    embed_tokens,
    param,
    predict,
    prediction_loss,
    residual_deviation,
)


@shown
class RouterLosses(NamedTuple):
    """Auxiliary losses, float32 `[]`, unweighted and summed over layers."""

    balance: jax.Array
    z: jax.Array


@shown
class Routing(NamedTuple):
    """The router's result.

    Attributes:
        gates: weights of the chosen experts, float32 `[batch, seq, top_k]`.
        chosen: indices of the chosen experts, int32 `[batch, seq, top_k]`, most probable first.
        losses: the auxiliary losses.
    """

    gates: jax.Array
    chosen: jax.Array
    losses: RouterLosses


def route(cfg: MoEConfig, logits: jax.Array) -> Routing:
    """Choose experts from the router's logits, float32 `[batch, seq, experts]`."""
    log_total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    probabilities = jnp.exp(logits - log_total)
    best, chosen = lax.top_k(logits, cfg.top_k)
    gates = jax.nn.softmax(best, axis=-1) if cfg.renormalize else jnp.exp(best - log_total)
    # The fractions are counts without a gradient. The gradient comes from the mean probabilities.
    fractions = jnp.mean(one_hot(chosen, cfg.experts, jnp.float32), axis=(0, 1, 2))
    balance = cfg.experts * jnp.sum(fractions * jnp.mean(probabilities, axis=(0, 1)))
    return Routing(gates, chosen, RouterLosses(balance, jnp.mean(jnp.square(log_total))))


class Experts(nnx.Module):
    """A mixture of experts in place of an MLP.

    Parameters: `router [width, experts]`, `w_up` and `w_gate [experts, width, ffn]`, `w_down [experts, ffn, width]`.
    """

    def __init__(self, cfg: MoEConfig, key: jax.Array):
        self.cfg = cfg
        router_key, up_key, down_key, gate_key, shared_key = jax.random.split(key, 5)
        experts, width, hidden = cfg.experts, cfg.gpt.width, cfg.expert_hidden
        residual_std = residual_deviation(cfg.gpt)
        self.router = param(router_key, cfg.gpt, (width, experts), 0.02)
        self.w_up = param(up_key, cfg.gpt, (experts, width, hidden), 0.02)
        self.w_down = param(down_key, cfg.gpt, (experts, hidden, width), residual_std)
        gated = cfg.gpt.mlp == "swiglu"
        self.w_gate = param(gate_key, cfg.gpt, (experts, width, hidden), 0.02) if gated else None
        shared = dataclasses.replace(cfg.gpt, ffn=max(cfg.shared_experts, 1) * hidden)
        self.shared = MLP(shared, shared_key, residual_std) if cfg.shared_experts else None

    def __call__(self, x: jax.Array, *, drop: bool = True) -> tuple[jax.Array, RouterLosses]:
        """Apply the experts to each position of `[batch, seq, width]`, and return the auxiliary losses.

        With `drop=False` no choice is dropped, whatever the `dispatch`, so each position's result depends only on that
        position.
        """
        # Small differences between logits decide the choice: compute in float32, and with HIGHEST precision, since
        # accelerators would otherwise round the operands.
        logits = jnp.einsum(
            "bsd,de->bse",
            x.astype(jnp.float32),
            self.router[...].astype(jnp.float32),
            precision=lax.Precision.HIGHEST,
        )
        routing = route(self.cfg, logits)
        run = self._by_capacity if self.cfg.dispatch == "capacity" and drop else self._by_sorting
        y = run(x, routing.gates, routing.chosen)
        return (y if self.shared is None else y + self.shared(x)), routing.losses

    def _by_capacity(self, x: jax.Array, gates: jax.Array, chosen: jax.Array) -> jax.Array:
        size = _group_size(self.cfg, x.shape[0], x.shape[1])
        gates, chosen, grouped = (a.reshape(-1, size, a.shape[2]) for a in (gates, chosen, x))
        taken, weighted = dispatch_masks(self.cfg, gates.astype(x.dtype), chosen)
        rows, combine, slot_gates = jnp.einsum("gsec,gsd->egcd", taken, grouped), weighted, None
        if recomputes(self.cfg.gpt.remat, "mlp_out"):
            combine, slot_gates = taken, jnp.swapaxes(jnp.sum(weighted, axis=1), 0, 1)
        return jnp.einsum("gsec,egcd->gsd", combine, self._expert_mlps(rows, slot_gates)).reshape(x.shape)

    def _by_sorting(self, x: jax.Array, gates: jax.Array, chosen: jax.Array) -> jax.Array:
        w_up, w_down, w_gate = (
            None if w is None else w[...].astype(x.dtype) for w in (self.w_up, self.w_down, self.w_gate)
        )
        assert w_up is not None and w_down is not None
        return dropless.experts(x, gates, chosen, w_up, w_down, w_gate)

    def _expert_mlps(self, rows: jax.Array, gates: jax.Array | None) -> jax.Array:
        """Apply each expert's MLP to its slots, `[experts, groups, capacity, width]`, and multiply by gates, if any."""

        def multiply(rows: jax.Array, weights: jax.Array) -> jax.Array:
            return quantized_einsum(SLOTS, rows, weights, self.cfg.gpt.quantization)

        unit, weights = (gelu, [self.w_up]) if self.w_gate is None else (swiglu, [self.w_gate, self.w_up])
        products = tuple(named(multiply(rows, w[...].astype(rows.dtype)), "mlp_in") for w in weights)
        down = self.w_down[...].astype(rows.dtype)
        if gates is None:
            return named(multiply(unit(products), down), "mlp_out")
        if self.cfg.gpt.quantization == "none":
            return named(gated_outputs(unit, products, gates, down), "mlp_out")
        return named(multiply(unit(products) * gates[..., None], down), "mlp_out")


def _group_size(cfg: MoEConfig, batch: int, seq: int) -> int:
    """Return the number of tokens in a group: as configured, but at most the tokens of the batch."""
    size = min(seq if cfg.group_size is None else cfg.group_size, batch * seq)
    if (batch * seq) % size:
        raise ValueError(
            f"MoE: {batch} x {seq} tokens do not divide into groups of {size}; change MoEConfig.group_size or the batch"
        )
    return size


class MoEBlock(nnx.Module):
    """One pre-norm layer: attention, then the experts, each added to the residual stream."""

    def __init__(self, cfg: MoEConfig, key: jax.Array):
        self.cfg = cfg
        attention_key, experts_key = jax.random.split(key)
        self.attention_norm, self.mlp_norm = Norm(cfg.gpt), Norm(cfg.gpt)
        self.attention = Attention(cfg.gpt, attention_key, residual_deviation(cfg.gpt))
        self.experts = Experts(cfg, experts_key)

    def __call__(self, x: jax.Array, key: jax.Array | None) -> tuple[jax.Array, RouterLosses]:
        """Apply the layer to `[batch, seq, width]`, with dropout if there is a key."""
        rate = self.cfg.gpt.dropout
        attention_key, experts_key = (None, None) if key is None else jax.random.split(key)
        x = named(x, "residual")
        y = scoped("attention", self.attention, scoped("attention_norm", self.attention_norm, x))
        x = dropout_add(x, y, rate, attention_key)
        y, losses = scoped("experts", self.experts, scoped("mlp_norm", self.mlp_norm, x))
        return dropout_add(x, y, rate, experts_key), losses

    def extend(self, x: jax.Array, cached: KeysValues, start: jax.Array) -> tuple[jax.Array, KeysValues]:
        """Apply the layer to the positions from `start` on, using cached keys and values. No choice is dropped."""
        y = scoped("attention_norm", self.attention_norm, x)
        y, cached = scoped("attention", self.attention.extend, y, cached, start)
        x = x + y
        return x + scoped("experts", self.experts, scoped("mlp_norm", self.mlp_norm, x), drop=False)[0], cached


class Group(nnx.Module):
    """A group of `moe_every` layers, the last of which has experts."""

    def __init__(self, cfg: MoEConfig, key: jax.Array):
        self.cfg = cfg
        keys = jax.random.split(key, cfg.moe_every)
        self.dense = nnx.List([Block(cfg.gpt, key) for key in keys[:-1]])
        self.moe = MoEBlock(cfg, keys[-1])

    def __call__(self, carry: tuple[jax.Array, RouterLosses], key: jax.Array | None) -> tuple[jax.Array, RouterLosses]:
        """Apply the layers to `[batch, seq, width]` and add to the losses."""
        x, losses = carry
        keys = [None] * self.cfg.moe_every if key is None else list(jax.random.split(key, self.cfg.moe_every))
        for block, block_key in zip(self.dense, keys[:-1], strict=True):
            x = block(x, block_key)
        x, more = self.moe(x, keys[-1])
        return x, RouterLosses(losses.balance + more.balance, losses.z + more.z)

    def extend(self, x: jax.Array, cached: KeysValues, start: jax.Array) -> tuple[jax.Array, KeysValues]:
        """Apply the layers to the positions from `start` on. Keys and values have a leading dimension `moe_every`."""
        parts = []
        for n, block in enumerate((*self.dense, self.moe)):
            x, part = block.extend(x, (cached[0][n], cached[1][n]), start)
            parts.append(part)
        keys, values = zip(*parts, strict=True)
        return x, (jnp.stack(keys), jnp.stack(values))


EXPERT_DIMS: Mapping[str, int] = MappingProxyType({"*/experts/router": -1, "*/experts/w_*": -3})
"""The experts dimension of each parameter of a `MoE` that has one, stacked or not, and of its optimizer state."""


class MoE(nnx.Module):
    """A transformer with experts: maps `[batch, seq]` tokens to `[batch, seq, vocab]` logits.

    Args:
        cfg: shape and numerics of the model.
        rngs: its `params` stream initializes the parameters, as in a `GPT`.

    >>> from autoshard.models.gpt import GPTConfig
    >>> cfg = MoEConfig(GPTConfig(layers=2, width=8, heads=2), experts=4, moe_every=2)
    >>> model = MoE(cfg, rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((2, 5), jnp.int32)).shape
    (2, 5, 256)
    """

    def __init__(self, cfg: MoEConfig, *, rngs: nnx.Rngs):
        self.cfg = cfg
        gpt = cfg.gpt
        embed_key, position_key, head_key, blocks_key = jax.random.split(rngs.params(), 4)
        learned, own_head = gpt.positions == "learned", not gpt.tie_head
        self.embed = param(embed_key, gpt, (gpt.vocab, gpt.width), 0.02)
        self.position = param(position_key, gpt, (gpt.context, gpt.width), 0.02) if learned else None
        group_keys = jax.random.split(blocks_key, gpt.layers // cfg.moe_every)
        self.blocks = make_layers(lambda key: Group(cfg, key), group_keys, scan=gpt.scan_layers)
        self.norm = Norm(gpt)
        self.head = param(head_key, gpt, (gpt.width, gpt.vocab), 0.02) if own_head else None

    def __call__(
        self, tokens: jax.Array, *, deterministic: bool = True, rngs: nnx.Rngs | jax.Array | None = None
    ) -> jax.Array:
        """Compute the logits of each position's next token, as `GPT.__call__` does."""
        return self.forward(tokens, deterministic=deterministic, rngs=rngs)[0]

    def forward(
        self, tokens: jax.Array, *, deterministic: bool = True, rngs: nnx.Rngs | jax.Array | None = None
    ) -> tuple[jax.Array, RouterLosses]:
        """Compute the logits `[batch, seq, vocab]` and the auxiliary losses.

        Args:
            tokens: integers `[batch, seq]`, seq at most `cfg.context`. A token outside the vocabulary gives NaNs.
            deterministic: whether dropout is off.
            rngs: source of the dropout key: an `nnx.Rngs` (its `dropout` stream) or a key.
        """
        x, losses = self._features(tokens, deterministic, rngs)
        return predict(x, self.embed, self.head), losses

    def _features(
        self, tokens: jax.Array, deterministic: bool, rngs: nnx.Rngs | jax.Array | None
    ) -> tuple[jax.Array, RouterLosses]:
        """Compute the features `[batch, seq, width]` of which the logits are a linear function, and the losses."""
        gpt = self.cfg.gpt
        keys = dropout_keys(gpt, deterministic, rngs)
        x = embed_tokens(gpt, self.embed, self.position, tokens)
        if keys is not None:
            x, keys = dropout(x, gpt.dropout, keys[0]), keys[1 : 1 + gpt.layers // self.cfg.moe_every]
        zero = jnp.zeros((), jnp.float32)
        x, losses = scoped("layers", run_layers, self.blocks, (x, RouterLosses(zero, zero)), keys, remat=gpt.remat)
        return scoped("norm", self.norm, x), losses

    def cache(self, batch: int, length: int | None = None) -> KVCache:
        """Make an empty cache for the keys and values of `length` positions, `cfg.context` by default.

        Keys and values are `[groups, moe_every, batch, length, kv_heads, head_dim]`.
        """
        gpt, every = self.cfg.gpt, self.cfg.moe_every
        rows = (batch, gpt.context if length is None else length)
        empty = jnp.zeros((gpt.layers // every, every, *rows, gpt.key_heads, gpt.head_dim), gpt.dtype)
        return KVCache((empty, empty), jnp.zeros((), jnp.int32))

    def extend(self, tokens: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Compute the logits of tokens that follow those in the cache, without recomputing the earlier positions.

        Tokens that arrive one by one cannot compete for slots, so no choice is dropped here. The logits equal those of
        a call on the whole sequence if that call drops no choice either: with `dispatch="dropless"`, or with enough
        capacity.

        Args:
            tokens: integers `[batch, seq]`. Together with the cached positions, they must fit into the cache.
            cache: from `cache`, or from the previous call.

        Returns:
            Logits `[batch, seq, vocab]`, and the extended cache.
        """
        start = cache.length
        x = embed_tokens(self.cfg.gpt, self.embed, self.position, tokens, start)
        x, keys_values = scoped(
            "layers", extend_layers, self.blocks, x, cache.kept, lambda group, x, cached: group.extend(x, cached, start)
        )
        logits = predict(scoped("norm", self.norm, x), self.embed, self.head)
        return logits, KVCache(keys_values, start + jnp.int32(tokens.shape[1]))

    def loss(
        self,
        batch: Mapping[str, jax.Array],
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Compute the loss of a batch of `inputs`, `targets` and `mask`, each `[batch, seq]`.

        In training (`deterministic=False`) the weighted auxiliary losses are added, multiplied by the number of tokens.
        The sum over any number of batches, divided by their tokens, is then the mean cross-entropy plus the weighted
        losses. In evaluation the loss is the cross-entropy alone.

        Returns:
            The loss in nats, summed over tokens, and the number of tokens, both float32 `[]`.
        """
        x, losses = self._features(batch["inputs"], deterministic, rngs)
        total, count = prediction_loss(self.cfg.gpt, x, self.embed, self.head, batch["targets"], batch["mask"])
        if deterministic:
            return total, count
        return total + count * (self.cfg.balance_weight * losses.balance + self.cfg.z_weight * losses.z), count
