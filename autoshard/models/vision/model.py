"""A decoder that reads images: features of a vision tower take the place of image tokens."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from autoshard.models.decoder.cache import DecoderCache
from autoshard.models.decoder.decoder import Decoder
from autoshard.models.vision.config import VisionLanguageConfig
from autoshard.models.vision.grids import Image, ImageSlots, pack_images, token_positions
from autoshard.models.vision.tower import VisionTower

Images = Mapping[str, jax.Array]


class VisionLanguage(nnx.Module):
    """A decoder with a vision tower: maps `[batch, seq]` tokens and images to `[batch, seq, vocab]` logits.

    Args:
        cfg: shape and numerics of the model.
        rngs: its `params` stream initializes the parameters.

    `pack_images` makes `images` and `token_positions` makes `positions`, on the host. The rows of the batch are
    the first dimension of all, so that a batch can be split into microbatches.
    """

    def __init__(self, cfg: VisionLanguageConfig, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.origin: Hashable = None  # what `save_pretrained` needs of a model that `load_pretrained` made
        self.vision = VisionTower(cfg.vision, rngs=rngs)
        self.text = Decoder(cfg.text, rngs=rngs)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        images: Images | None = None,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Compute the logits of each position's next token.

        Args:
            tokens: integers `[batch, seq]`, with an image token for each feature of an image.
            images: the images of each row, from `pack_images`. `places [batch, seq]` is the number of the feature of
                its row that takes the place of a token, or -1. The others are the arguments of `VisionTower`.
            positions: time, row and column of each token, `[batch, 3, seq]`, or `[batch, seq]` for text alone.
            segment_ids: the document of each token, `[batch, seq]`.

        Returns:
            `[batch, seq, vocab]` in `cfg.text.dtype`.
        """
        return self.text.logits(self._features(tokens, images, positions, segment_ids))

    def loss(self, batch: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
        """Compute the cross-entropy of a batch, as `Decoder.loss` does. The batch may have `images`."""
        x = self._features(batch["inputs"], batch.get("images"), batch.get("positions"), batch.get("segment_ids"))
        return self.text.loss_of(x, batch["targets"], batch.get("mask"))

    def cache(self, batch: int, length: int | None = None) -> DecoderCache:
        """Make an empty cache for rows of up to `length` positions, the decoder's context by default."""
        return self.text.cache(batch, length)

    def extend(
        self,
        tokens: jax.Array,
        cache: DecoderCache,
        *,
        images: Images | None = None,
        positions: jax.Array | None = None,
        counts: jax.Array | None = None,
        fresh: bool = False,
        last: bool = False,
    ) -> tuple[jax.Array, DecoderCache]:
        """Compute the logits of tokens that follow those in the cache, as `Decoder.extend` does.

        Args:
            tokens: integers `[batch, seq]`.
            cache: from `cache`, or from the previous call.
            images: the images of these tokens.
            positions: `[batch, 3, seq]`, or `[batch, seq]` for text alone; by default counted on from the cached ones.
            counts: number of real tokens of each row.
            fresh: whether the cache is empty.
            last: whether to compute the logits of the last real token of each row alone.
        """
        x = self._embedded(tokens, images)
        options = {"counts": counts, "fresh": fresh, "last": last}
        return self.text.extend(tokens, cache, embedded=x, positions=_axes_first(positions), **options)

    @property
    def image_slots(self) -> ImageSlots:
        """How images take their places among the tokens of a prompt."""
        return ImageSlots(self.cfg.image_token, self.cfg.vision.merge)

    def prompt_inputs(
        self, tokens: np.ndarray, counts: np.ndarray, images: Sequence[Sequence[Image]]
    ) -> dict[str, Any]:
        """Return what `extend` takes besides the tokens of new prompts.

        Args:
            tokens: `[batch, seq]`, padded at the end.
            counts: number of real tokens of each row, `[batch]`.
            images: the images of each row, in order. Without any, the vision tower does not run.

        Raises:
            AutoshardError: images do not have the form of the model, or are not those of the tokens.
        """
        real = np.where(np.arange(tokens.shape[1]) < counts[:, None], tokens, -1)
        found: dict[str, Any] = {
            "positions": token_positions(real, [[grid for _, grid in row] for row in images], self.cfg)
        }
        if any(images):
            found["images"] = pack_images(real, images, self.cfg)
        return found

    def prompt_shapes(self, batch: int, seq: int) -> dict[str, Any]:
        """Return the shapes of `prompt_inputs` for prompts with images."""
        shapes = self.cfg.batch(batch, seq)
        return {name: shapes[name] for name in ("positions", "images")}

    def _features(
        self,
        tokens: jax.Array,
        images: Images | None,
        positions: jax.Array | None,
        segment_ids: jax.Array | None,
    ) -> jax.Array:
        x = self._embedded(tokens, images)
        return self.text.features(tokens, _axes_first(positions), segment_ids, embedded=x)

    def _embedded(self, tokens: jax.Array, images: Images | None) -> jax.Array | None:
        """Embed tokens, with the features of images in their places, as `[batch, seq, width]`."""
        if images is None:
            return None
        places = images["places"][..., None]
        features = self.vision(
            images["patches"], _axes_first(images["positions"]), images["segment_ids"], images.get("region_ids")
        )
        x = self.text.embedded(tokens)
        taken = jnp.take_along_axis(features, jnp.maximum(places, 0), axis=1).astype(x.dtype)
        return jnp.where(places >= 0, taken, x)


def _axes_first(positions: Any) -> Any:
    """Return positions `[batch, axes, seq]` as `[axes, batch, seq]`, and others as they are."""
    return positions if positions is None or positions.ndim != 3 else jnp.moveaxis(positions, 1, 0)
