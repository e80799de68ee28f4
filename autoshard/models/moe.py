"""A decoder-only transformer in which some layers' MLP is a mixture of experts, written for one device.

    probability = softmax(x @ router)                            over experts, in float32
    y = sum over the top_k likeliest experts of gate * expert(x)

Every `moe_every`-th layer is such a layer, the others are `GPT`'s blocks; embedding, attention and head are
`GPT`'s too. A group of `moe_every` layers is what is stacked, scanned over and rematerialised.

Tokens find their experts in one of two ways.

- `capacity`: the tokens of a group of `group_size` compete for `capacity` places at each expert, all first choices
  before all second ones. They are moved by products with one-hot masks, `[groups, group_size, experts, capacity]`,
  whose size grows with the batch and not with its square. A choice without a place is dropped: that expert adds
  nothing, and a token without any place passes by the residual alone. A later token's first choice can so cost an
  earlier one its second.
- `dropless`: tokens are sorted by expert, and each expert multiplies the rows of its own (`models.dropless`).

Two auxiliary losses keep experts in use and logits small, of all tokens of the batch, summed over layers: balance,
`experts * sum_e fraction_of_choices[e] * mean_probability[e]`, which is 1 where experts are chosen alike, and z,
`mean log(sum_e exp(logit[e]))^2`.

Sources: Shazeer et al. (arXiv:1701.06538); groups, capacity and the order of choices, GShard (arXiv:2006.16668);
balance loss, Switch Transformer (arXiv:2101.03961, equation 4); z loss, ST-MoE (arXiv:2202.08906, equation 5); no
dropping, MegaBlocks (arXiv:2211.15841); gates by a softmax over the chosen, Mixtral (arXiv:2401.04088); shared
experts, DeepSeekMoE (arXiv:2401.06066).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from autoshard.models import dropless
from autoshard.models.gpt import (
    MLP,
    Attention,
    Block,
    GPTConfig,
    KeysValues,
    KVCache,
    Norm,
    dropout,
    dropout_keys,
    embed_tokens,
    param,
    predict,
    residual_deviation,
)
from autoshard.models.loss import cross_entropy
from autoshard.models.stack import extend_layers, make_layers, remat_problems, run_layers


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Shape and numerics of a `MoE`.

    Args:
        gpt: everything but the experts: sizes, attention, the layers without experts, numerics.
        experts: experts in a layer.
        top_k: experts that a token is given to.
        expert_ffn: hidden size of an expert, `gpt.hidden` where None.
        moe_every: every so many layers, the last of them has experts; divides `gpt.layers`.
        shared_experts: experts that every token is given to besides, one MLP of so many times `expert_ffn`.
        dispatch: `capacity` or `dropless`.
        capacity_factor: places at an expert for each that it needs where all are chosen alike.
        group_size: tokens that compete for places; a sequence's where None.
        renormalize: whether the gates of the chosen add up to 1; else they are the probabilities themselves.
        balance_weight: weight of the load-balancing loss.
        z_weight: weight of the router's z loss.

    Raises:
        ValueError: naming every field that does not fit.
    """

    gpt: GPTConfig = GPTConfig()
    experts: int = 8
    top_k: int = 2
    expert_ffn: int | None = None
    moe_every: int = 1
    shared_experts: int = 0
    dispatch: Literal["capacity", "dropless"] = "capacity"
    capacity_factor: float = 1.25
    group_size: int | None = None
    renormalize: bool = True
    balance_weight: float = 0.01
    z_weight: float = 0.001

    def __post_init__(self) -> None:
        problems = []
        for name in ("experts", "top_k", "expert_ffn", "moe_every", "group_size"):
            size = getattr(self, name)
            if size is not None and size < 1:
                problems.append(f"{name} is {size}; it must be at least 1")
        for name in ("shared_experts", "balance_weight", "z_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                problems.append(f"{name} is {getattr(self, name)}; it must be at least 0 and finite")
        if self.dispatch not in ("capacity", "dropless"):
            problems.append(f"dispatch is {self.dispatch!r}; choose one of capacity, dropless")
        if self.top_k > self.experts:
            problems.append(f"top_k {self.top_k} is more than the {self.experts} experts")
        if self.top_k == 1 and self.renormalize:
            problems.append("top_k is 1 and renormalize=True: gates of 1 teach the router nothing; set it to False")
        if not 0 < self.capacity_factor < math.inf:
            problems.append(f"capacity_factor is {self.capacity_factor}; it must be above 0 and finite")
        if self.moe_every > 0 and self.gpt.layers % self.moe_every:
            problems.append(f"layers {self.gpt.layers} is not a multiple of moe_every {self.moe_every}; change one")
        elif self.moe_every > 0:
            groups = self.gpt.layers // self.moe_every
            problems += remat_problems(self.gpt.remat, groups, scan=self.gpt.scan_layers)
        if problems:
            raise ValueError("MoEConfig: " + "; ".join(problems))

    @property
    def context(self) -> int:
        """Longest sequence."""
        return self.gpt.context

    @property
    def vocab(self) -> int:
        """Number of different tokens."""
        return self.gpt.vocab

    @property
    def expert_hidden(self) -> int:
        """Hidden size of an expert: `expert_ffn`, or the dense layers'."""
        return self.gpt.hidden if self.expert_ffn is None else self.expert_ffn

    def capacity(self, group_size: int) -> int:
        """Places at an expert for the tokens of a group."""
        return min(group_size, math.ceil(self.capacity_factor * self.top_k * group_size / self.experts))


class RouterLosses(NamedTuple):
    """Auxiliary losses, float32 `[]`, unweighted and summed over layers."""

    balance: jax.Array
    z: jax.Array


class Routing(NamedTuple):
    """Where tokens go: `gates` float32 and `chosen` int32 `[batch, seq, top_k]`, likeliest first."""

    gates: jax.Array
    chosen: jax.Array
    losses: RouterLosses


def route(cfg: MoEConfig, logits: jax.Array) -> Routing:
    """Choose experts by the router's logits, float32 `[batch, seq, experts]`."""
    log_total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    probabilities = jnp.exp(logits - log_total)
    best, chosen = lax.top_k(logits, cfg.top_k)
    gates = jax.nn.softmax(best, axis=-1) if cfg.renormalize else jnp.exp(best - log_total)
    # The fractions are counts and have no gradient: the mean probabilities carry it.
    fractions = jnp.mean(_one_hot(chosen, cfg.experts, jnp.float32), axis=(0, 1, 2))
    balance = cfg.experts * jnp.sum(fractions * jnp.mean(probabilities, axis=(0, 1)))
    return Routing(gates, chosen, RouterLosses(balance, jnp.mean(jnp.square(log_total))))


def _one_hot(x: jax.Array, size: int, dtype: jax.typing.DTypeLike) -> jax.Array:
    """`[...]` to `[..., size]`; a position outside of it is a row of zeros."""
    return (x[..., None] == lax.broadcasted_iota(x.dtype, (*x.shape, size), x.ndim)).astype(dtype)


def dispatch_masks(cfg: MoEConfig, gates: jax.Array, chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which place a token takes and what it gets back.

    Args:
        cfg: the model's config.
        gates: `[groups, group_size, top_k]`.
        chosen: experts, int32 `[groups, group_size, top_k]`.

    Returns:
        A mask of places taken, and the same with gates for ones: `[groups, group_size, experts, capacity]` in the
        gates' dtype.
    """
    groups, size, top_k = chosen.shape
    choice = _one_hot(chosen, cfg.experts, jnp.int32)
    # An expert's queue: all first choices in the order of tokens, then all second ones.
    queue = jnp.swapaxes(choice, 1, 2).reshape(groups, top_k * size, cfg.experts)
    before = (jnp.cumsum(queue, axis=1) - queue).reshape(groups, top_k, size, cfg.experts)
    place = jnp.sum(jnp.swapaxes(before, 1, 2) * choice, axis=-1)
    slots = _one_hot(place, cfg.capacity(size), gates.dtype)  # places beyond the capacity are rows of zeros
    choice = choice.astype(gates.dtype)
    taken = jnp.einsum("gske,gskc->gsec", choice, slots)
    return taken, jnp.einsum("gske,gskc->gsec", choice * gates[..., None], slots)


class Experts(nnx.Module):
    """A router `[embed, experts]` and experts' weights `[experts, embed, ffn]` and `[experts, ffn, embed]`."""

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
        """Map each position of `[batch, seq, embed]`, and say what the routing costs.

        With `drop=False` no choice is dropped, whatever `dispatch` says: what a position gets is then its own alone.
        """
        # In float32, on accelerators that would round the operands too: the choice turns on small differences.
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
        outputs = self._expert(jnp.einsum("gsec,gsd->egcd", taken, grouped))
        return jnp.einsum("gsec,egcd->gsd", weighted, outputs).reshape(x.shape)

    def _by_sorting(self, x: jax.Array, gates: jax.Array, chosen: jax.Array) -> jax.Array:
        w_up, w_down, w_gate = (
            None if w is None else w[...].astype(x.dtype) for w in (self.w_up, self.w_down, self.w_gate)
        )
        assert w_up is not None and w_down is not None
        return dropless.experts(x, gates, chosen, w_up, w_down, w_gate)

    def _expert(self, rows: jax.Array) -> jax.Array:
        """The MLP of each expert on its places, `[experts, groups, capacity, embed]`."""

        def multiply(rows: jax.Array, weights: jax.Array) -> jax.Array:
            return jnp.einsum("egci,eio->egco", rows, weights)

        hidden = multiply(rows, self.w_up[...].astype(rows.dtype))
        if self.w_gate is None:
            hidden = jax.nn.gelu(hidden)
        else:
            hidden = jax.nn.silu(multiply(rows, self.w_gate[...].astype(rows.dtype))) * hidden
        return multiply(hidden, self.w_down[...].astype(rows.dtype))


def _group_size(cfg: MoEConfig, batch: int, seq: int) -> int:
    """Tokens of a group: as the config says, or all there are where these are fewer."""
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
        """Map `[batch, seq, width]`, dropping elements where there is a key."""
        rate = self.cfg.gpt.dropout
        attention_key, experts_key = (None, None) if key is None else jax.random.split(key)
        x = x + dropout(self.attention(self.attention_norm(x)), rate, attention_key)
        y, losses = self.experts(self.mlp_norm(x))
        return x + dropout(y, rate, experts_key), losses

    def extend(self, x: jax.Array, kept: KeysValues, start: jax.Array) -> tuple[jax.Array, KeysValues]:
        """Map positions from `start` on, with keys and values of the earlier ones; no choice is dropped."""
        y, kept = self.attention.extend(self.attention_norm(x), kept, start)
        x = x + y
        return x + self.experts(self.mlp_norm(x), drop=False)[0], kept


class Group(nnx.Module):
    """`moe_every` layers, of which the last has experts."""

    def __init__(self, cfg: MoEConfig, key: jax.Array):
        self.cfg = cfg
        keys = jax.random.split(key, cfg.moe_every)
        self.dense = nnx.List([Block(cfg.gpt, key) for key in keys[:-1]])
        self.moe = MoEBlock(cfg, keys[-1])

    def __call__(self, carry: tuple[jax.Array, RouterLosses], key: jax.Array | None) -> tuple[jax.Array, RouterLosses]:
        """Map `[batch, seq, width]` and add to the losses."""
        x, losses = carry
        keys = [None] * self.cfg.moe_every if key is None else list(jax.random.split(key, self.cfg.moe_every))
        for block, own in zip(self.dense, keys[:-1], strict=True):
            x = block(x, own)
        x, more = self.moe(x, keys[-1])
        return x, RouterLosses(losses.balance + more.balance, losses.z + more.z)

    def extend(self, x: jax.Array, kept: KeysValues, start: jax.Array) -> tuple[jax.Array, KeysValues]:
        """Map positions from `start` on; keys and values have a leading dimension of the group's layers."""
        parts = []
        for n, block in enumerate((*self.dense, self.moe)):
            x, part = block.extend(x, (kept[0][n], kept[1][n]), start)
            parts.append(part)
        keys, values = zip(*parts, strict=True)
        return x, (jnp.stack(keys), jnp.stack(values))


EXPERT_DIMS: Mapping[str, int] = MappingProxyType({"*/experts/router": -1, "*/experts/w_*": -3})
"""The dimension of experts of the parameters of a `MoE`, stacked or not, and of what is kept for each of them."""


class MoE(nnx.Module):
    """The model: `[batch, seq]` tokens to `[batch, seq, vocab]` logits.

    Args:
        cfg: its shape and numerics.
        rngs: the `params` stream initialises it as it does a `GPT`.

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
        """Logits of each position's next token, as a `GPT` gives them."""
        return self.forward(tokens, deterministic=deterministic, rngs=rngs)[0]

    def forward(
        self, tokens: jax.Array, *, deterministic: bool = True, rngs: nnx.Rngs | jax.Array | None = None
    ) -> tuple[jax.Array, RouterLosses]:
        """Logits `[batch, seq, vocab]`, and the auxiliary losses.

        Args:
            tokens: integers `[batch, seq]`, seq at most `cfg.context`. One outside the vocabulary makes NaNs.
            deterministic: whether dropout is off.
            rngs: where dropout's key comes from: an `nnx.Rngs` (its `dropout` stream) or a key.
        """
        gpt = self.cfg.gpt
        keys = dropout_keys(gpt, deterministic, rngs)
        x = embed_tokens(gpt, self.embed, self.position, tokens)
        if keys is not None:
            x, keys = dropout(x, gpt.dropout, keys[0]), keys[1 : 1 + gpt.layers // self.cfg.moe_every]
        zero = jnp.zeros((), jnp.float32)
        x, losses = run_layers(self.blocks, (x, RouterLosses(zero, zero)), keys, remat=gpt.remat)
        return predict(self.norm(x), self.embed, self.head), losses

    def cache(self, batch: int, length: int | None = None) -> KVCache:
        """Room for the keys and values of so many positions, as `GPT.cache` has it.

        They are `[groups, moe_every, batch, length, kv_heads, head_dim]`.
        """
        gpt, every = self.cfg.gpt, self.cfg.moe_every
        places = (batch, gpt.context if length is None else length)
        empty = jnp.zeros((gpt.layers // every, every, *places, gpt.key_heads, gpt.head_dim), gpt.dtype)
        return KVCache((empty, empty), jnp.zeros((), jnp.int32))

    def extend(self, tokens: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Logits of the tokens that follow those which the cache has seen, without running these again.

        Tokens that come one by one cannot compete for places: none is dropped here, so that the logits are those of
        the whole sequence where that drops none, as with `dispatch="dropless"`, or with capacity to spare.

        Args:
            tokens: integers `[batch, seq]`; with those that were seen at most as many as the cache has room for.
            cache: from `cache`, or from the last call.

        Returns:
            Logits `[batch, seq, vocab]`, and the cache that has seen these, too.
        """
        start = cache.length
        x = embed_tokens(self.cfg.gpt, self.embed, self.position, tokens, start)
        x, kept = extend_layers(self.blocks, x, cache.kept, lambda group, x, own: group.extend(x, own, start))
        logits = predict(self.norm(x), self.embed, self.head)
        return logits, KVCache(kept, start + jnp.int32(tokens.shape[1]))

    def loss(
        self,
        batch: Mapping[str, jax.Array],
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Loss of a batch of `inputs`, `targets` and `mask`, each `[batch, seq]`.

        In training (`deterministic=False`) the auxiliary losses are added, times the count of tokens, so that the
        quotient is the mean cross-entropy plus the weighted losses, however many batches are added up. In
        evaluation it is the cross-entropy alone.

        Returns:
            The loss in nats, summed over tokens, and their count: float32 `[]`.
        """
        logits, losses = self.forward(batch["inputs"], deterministic=deterministic, rngs=rngs)
        total, count = cross_entropy(logits, batch["targets"], batch["mask"])
        if deterministic:
            return total, count
        return total + count * (self.cfg.balance_weight * losses.balance + self.cfg.z_weight * losses.z), count
