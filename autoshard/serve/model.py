"""The interface of models that can generate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from autoshard.models.decoder.cache import DecoderCache
from autoshard.models.vision.grids import Image, ImageSlots


@runtime_checkable
class GenerativeModel(Protocol):
    """A model whose text is generated, as an nnx module.

    A model of text alone is `autoshard.models.Decoder`; one that reads images is
    `autoshard.models.vision.VisionLanguage`.

    Attributes:
        cfg: its config, with `vocab` and `context`, the largest number of positions of a row.
    """

    cfg: Any

    @property
    def image_slots(self) -> ImageSlots | None:
        """How images take their places among the tokens of a prompt; None if the model reads none."""
        ...

    def cache(self, batch: int, length: int | None = None) -> DecoderCache:
        """Make an empty cache for `batch` rows of up to `length` positions."""
        ...

    def extend(self, *arguments: Any, **options: Any) -> tuple[jax.Array, DecoderCache]:
        """Compute the logits of tokens that follow those in the cache, and extend the cache.

        It is called as `extend(tokens, cache, counts=)` for one token of each row, and as
        `extend(tokens, cache, counts=, fresh=True, last=True, **prompt_inputs)` for new prompts; see `Decoder.extend`.
        """
        ...

    def prompt_inputs(
        self, tokens: np.ndarray, counts: np.ndarray, images: Sequence[Sequence[Image]]
    ) -> dict[str, Any]:
        """Return what `extend` takes besides the tokens of new prompts, on the host. The rows are the first dimension.

        Args:
            tokens: `[batch, seq]`, padded at the end.
            counts: number of real tokens of each row, `[batch]`.
            images: the images of each row.
        """
        ...

    def prompt_shapes(self, batch: int, seq: int) -> dict[str, Any]:
        """Return the shapes of `prompt_inputs` for usual prompts, for which the prefill step is planned."""
        ...
