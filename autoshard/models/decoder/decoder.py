"""A decoder-only transformer in Flax NNX, written for one device, with the switches of the published families.

    x = embed(tokens) * embed_scale
    x = x + attention(norm(x)); x = x + mlp(norm(x))        for each layer
    logits = norm(x) @ head

Layers whose kinds repeat are a segment: one `Group` with stacked parameters, which runs in a scan, or a list of groups.
There are no sharding annotations here: `auto_shard` finds the shardings.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from autoshard.kernels.blockwise_attention import soft_capped
from autoshard.kernels.cross_entropy import linear_cross_entropy
from autoshard.models.decoder.cache import DecoderCache, Rows, counted_on, written
from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.decoder.experts import Load
from autoshard.models.decoder.layer_inputs import LayerInputs
from autoshard.models.decoder.layers import Norm, normal
from autoshard.models.decoder.quantized_weight import with_readable_codes
from autoshard.models.decoder.segments import segments_of
from autoshard.models.decoder.single_rows import by_slices, rows_of
from autoshard.models.decoder.stacks import chunks_of, make_segments, make_sides, run_segments, segment_inputs
from autoshard.models.loss import sum_and_count, token_losses
from autoshard.models.scopes import scoped
from autoshard.models.stack import extend_layers


class Decoder(nnx.Module):
    """A decoder-only transformer: maps `[batch, seq]` tokens to `[batch, seq, vocab]` logits.

    Args:
        cfg: shape and numerics of the model.
        rngs: its `params` stream initializes the parameters.

    >>> from autoshard.models.decoder import LayerKind
    >>> sizes = {"vocab": 16, "width": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "ffn": 16, "context": 32}
    >>> cfg = DecoderConfig(kinds=(LayerKind(),), **sizes)
    >>> Decoder(cfg, rngs=nnx.Rngs(0))(jnp.zeros((2, 5), jnp.int32)).shape
    (2, 5, 16)
    """

    def __init__(self, cfg: DecoderConfig, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.origin: Hashable = None  # what `save_pretrained` needs of a model that `load_pretrained` made
        embed_key, head_key, layers_key = jax.random.split(rngs.params(), 3)
        self.embed = normal(embed_key, cfg, cfg.vocab, cfg.width)
        learned, shape = cfg.learned_positions, (cfg.context, cfg.width)
        self.position = normal(jax.random.fold_in(embed_key, 1), cfg, *shape) if learned else None
        self.layer_inputs = None if cfg.layer_inputs is None else LayerInputs(cfg, jax.random.fold_in(embed_key, 2))
        self.segments = make_segments(cfg, layers_key)
        self.norm = Norm(cfg, cfg.width)
        self.head = None if cfg.tie_head else normal(head_key, cfg, cfg.width, cfg.vocab)

    def __call__(
        self, tokens: jax.Array, *, positions: jax.Array | None = None, segment_ids: jax.Array | None = None
    ) -> jax.Array:
        """Compute the logits of each position's next token.

        Args:
            tokens: integers `[batch, seq]`, seq at most `cfg.context`. A token outside the vocabulary gives NaNs.
            positions: the position of each token, `[batch, seq]`; by default counted from 0. Rotary positions with
                sections take `[axes, batch, seq]`, too.
            segment_ids: the document of each token, `[batch, seq]`: a token sees only its own document. Give padding a
                document of its own.

        Returns:
            `[batch, seq, vocab]` in `cfg.dtype`, float32 with a soft cap.
        """
        return self.logits(self.features(tokens, positions, segment_ids))

    def loss(self, batch: Mapping[str, jax.Array], *, deterministic: bool = False) -> tuple[jax.Array, jax.Array]:
        """Compute the cross-entropy of a batch, with logits in `cfg.loss_chunks` chunks.

        In training, `cfg.router_loss` times the loss that balances the experts' load is added to the mean. All
        positions of the batch count for it, also those of padding.

        Args:
            batch: `inputs` and `targets`, integers `[batch, seq]`; optionally `mask`, weights `[batch, seq]`, and
                `positions` and `segment_ids` as in a call.
            deterministic: whether this is an evaluation, which leaves out the loss of the experts' load.

        Returns:
            The loss in nats, summed over tokens, and the number of tokens, both float32 `[]`.
        """
        given = batch["inputs"], batch.get("positions"), batch.get("segment_ids")
        if deterministic or not self.cfg.router_loss or self.cfg.experts is None:
            return self.loss_of(self.features(*given), batch["targets"], batch.get("mask"))
        x, load = self._run(*given, load=Load.none(self.cfg.experts.experts))
        total, count = self.loss_of(x, batch["targets"], batch.get("mask"))
        return total + self.cfg.router_loss * load.loss() * count, count

    def loss_of(self, x: jax.Array, targets: jax.Array, mask: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Compute the cross-entropy of features `[batch, seq, width]`, as `loss` does."""
        return sum_and_count(self.token_losses(x, targets), mask)

    def token_losses(self, x: jax.Array, targets: jax.Array) -> jax.Array:
        """Compute the cross-entropy of each token of `[batch, seq, width]` features, float32 `[batch, seq]`."""
        if self.cfg.loss_chunks == 1:
            return scoped("head", token_losses, self.logits(x), targets)
        weight, vocab_axis = (self.embed, 0) if self.head is None else (self.head, 1)
        # The cast comes first, so that the gradient is summed over devices in the dtype of the computation.
        weight = weight[...].astype(x.dtype)
        with jax.named_scope("head"):
            return linear_cross_entropy(
                x, weight, targets, chunks=self.cfg.loss_chunks, vocab_axis=vocab_axis, soft_cap=self.cfg.logit_cap
            )

    def features(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        *,
        embedded: jax.Array | None = None,
    ) -> jax.Array:
        """Compute the features `[batch, seq, width]` of which the logits are a linear function.

        `embedded`, `[batch, seq, width]`, takes the place of the tokens' embedding.
        """
        return self._run(tokens, positions, segment_ids, embedded=embedded)

    def _run(
        self,
        tokens: jax.Array,
        positions: jax.Array | None,
        segment_ids: jax.Array | None,
        *,
        embedded: jax.Array | None = None,
        load: Load | None = None,
    ) -> Any:
        """Compute the features. Given the experts' load before the first layer, also return that after the last."""
        self._check(tokens)
        chunks = chunks_of(self.cfg, tokens, positions, segment_ids)
        if positions is None:
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        x = self._placed(self.embedded(tokens) if embedded is None else embedded, positions)
        inputs = None if self.layer_inputs is None else self.layer_inputs(tokens, x)
        sides = make_sides(self.cfg, positions, segment_ids, chunks=chunks)
        if load is None:
            return scoped("norm", self.norm, run_segments(self.cfg, self.segments, x, sides, inputs))
        x, load = run_segments(self.cfg, self.segments, (x, load), sides, inputs)
        return scoped("norm", self.norm, x), load

    image_slots = None
    """A `Decoder` reads no images."""

    def prompt_inputs(self, tokens: Any, counts: Any, images: Any) -> dict[str, Any]:
        """Return what `extend` takes besides the tokens of new prompts: nothing."""
        return {}

    def prompt_shapes(self, batch: int, seq: int) -> dict[str, Any]:
        """Return the shapes of `prompt_inputs`."""
        return {}

    def cache(self, batch: int, length: int | None = None) -> DecoderCache:
        """Make an empty cache for rows of up to `length` positions, `cfg.context` by default."""
        if not self.cfg.causal:
            raise ValueError("Decoder: a model whose config has causal=False does not generate, so it has no cache")
        length = self.cfg.context if length is None else length
        found = []
        for segment, layers in zip(segments_of(self.cfg.kinds), self.segments, strict=True):
            group: Any = layers[0] if isinstance(layers, nnx.List) else layers
            kept = group.kept(batch, length)
            found.append(jax.tree.map(lambda x, n=segment.repeats: jnp.zeros((n, *x.shape), x.dtype), kept))
        return DecoderCache(tuple(found), jnp.zeros((batch,), jnp.int32), jnp.zeros((batch,), jnp.int32))

    def extend(
        self,
        tokens: jax.Array,
        cache: DecoderCache,
        *,
        embedded: jax.Array | None = None,
        positions: jax.Array | None = None,
        counts: jax.Array | None = None,
        fresh: bool = False,
        last: bool = False,
    ) -> tuple[jax.Array, DecoderCache]:
        """Compute the logits of tokens that follow those in the cache, without recomputing the earlier positions.

        Args:
            tokens: integers `[batch, seq]`. Together with the cached positions, they must fit into the cache.
            cache: from `cache`, or from the previous call.
            embedded: `[batch, seq, width]`, in place of the tokens' embedding.
            positions: the position of each token, as in a call; by default counted on from the cached ones. Behind
                positions with axes, they are counted on from the largest one of the row.
            counts: number of real tokens of each row, int32 `[batch]`; the rest of a row is padding. Default: all.
            fresh: whether the cache is empty, which is then not read. Attention runs in its kernel.
            last: whether to compute the logits of the last real token of each row alone.

        Returns:
            Logits `[batch, seq, vocab]`, or `[batch, 1, vocab]` with `last`, equal to those of a call on the whole
            sequence; and the extended cache.
        """
        self._check(tokens)
        batch, seq = tokens.shape
        counts = jnp.full((batch,), seq, jnp.int32) if counts is None else counts.astype(jnp.int32)
        rows = Rows(cache.lengths, counts, fresh)
        following = cache.following + counts
        if positions is None:
            positions = counted_on(cache.following, seq)
        else:
            following = _following(positions, counts, cache.following)
        x = self._placed(self.embedded(tokens) if embedded is None else embedded, positions)
        # Ids of chunks count positions from the start of a row, so only fresh rows use them.
        sides = make_sides(self.cfg, positions, None, chunks=chunks_of(self.cfg, tokens, None, None) if fresh else None)
        inputs = None if self.layer_inputs is None else self.layer_inputs(tokens, x)
        after = []
        for segment, layers, kept in zip(segments_of(self.cfg.kinds), self.segments, cache.kept, strict=True):
            x, new = scoped(
                "layers",
                extend_layers,
                with_readable_codes(layers),
                x,
                (segment_inputs(segment, inputs), kept),
                lambda group, x, own, sides=sides: group.extend(x, own[0], sides, own[1], rows),
            )
            # A layer that lends its keys and values is alone in its segment.
            first = jax.tree.map(lambda x: x[0], (new[0], kept[0])) if segment.pattern[0].lends else ((), ())
            sides = sides.lending(segment.pattern[0].lends, *first)
            # Written behind all layers, in place: a layer that wrote its slice would copy it.
            after.append(jax.tree.map(lambda kept, new: written(kept, new, rows), kept, new))
        if last:
            x = jnp.take_along_axis(x, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)
        return self.logits(scoped("norm", self.norm, x)), DecoderCache(tuple(after), cache.lengths + counts, following)

    def embedded(self, tokens: jax.Array) -> jax.Array:
        """Embed tokens as `[batch, seq, width]`, without positions."""
        self._check(tokens)
        with jax.named_scope("embed"):
            table = self.embed[...]
            if tokens.shape[1] == 1 and by_slices(table):
                x = rows_of(table, tokens)
            else:
                # `fill` without wrapping: an id outside the vocabulary gives NaN instead of another token's row.
                x = table.at[tokens].get(mode="fill", wrap_negative_indices=False)
            x = x.astype(self.cfg.dtype)
            return x if self.cfg.embed_scale == 1.0 else x * jnp.asarray(self.cfg.embed_scale, x.dtype)

    def _placed(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Add the vector of each position, if positions are learned."""
        if self.position is None:
            return x
        return x + self.position[...].at[positions].get(mode="fill", wrap_negative_indices=False).astype(x.dtype)

    def logits(self, x: jax.Array) -> jax.Array:
        """Compute the logits of features `[batch, seq, width]`."""
        with jax.named_scope("head"):
            if self.head is None:
                logits = jnp.einsum("bse,ve->bsv", x, self.embed[...].astype(x.dtype))
            else:
                logits = jnp.einsum("bse,ev->bsv", x, self.head[...].astype(x.dtype))
            cap = self.cfg.logit_cap
            return logits if cap is None else soft_capped(logits.astype(jnp.float32), cap)

    def _check(self, tokens: jax.Array) -> None:
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"Decoder: tokens must be integers [batch, seq], not {tokens.dtype}{list(tokens.shape)}")
        if tokens.shape[1] > self.cfg.context:
            raise ValueError(
                f"Decoder: tokens have {tokens.shape[1]} positions (dim 1), more than the context of "
                f"{self.cfg.context}. Pass fewer positions, or build the model with a larger context"
            )


def _following(positions: jax.Array, counts: jax.Array, before: jax.Array) -> jax.Array:
    """Return the position behind the largest one of the real tokens of each row; `before` of rows without any.

    Args:
        positions: of the new tokens, `[batch or 1, seq]` or `[axes, batch, seq]`.
        counts: number of real tokens of each row, `[batch]`.
        before: int32 `[batch]`.
    """
    largest = positions if positions.ndim == 2 else jnp.max(positions, axis=0)
    real = counted_on(jnp.zeros_like(counts), largest.shape[1]) < counts[:, None]
    behind = jnp.max(jnp.where(real, largest + 1, 0), axis=1)
    return jnp.where(counts > 0, behind, before).astype(jnp.int32)
