"""What generation needs of a model."""

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
        image_slots: how images take their places among the tokens of a prompt; None if the model reads none.
    """

    cfg: Any

    @property
    def image_slots(self) -> ImageSlots | None: ...

    def cache(self, batch: int, length: int | None = None) -> DecoderCache:
        """Make an empty cache for `batch` rows of up to `length` positions."""
        ...

    def extend(
        self, tokens: jax.Array, cache: DecoderCache, *, counts: jax.Array | None = None, fresh: bool = False,
        last: bool = False, **inputs: Any,
    ) -> tuple[jax.Array, DecoderCache]:  # fmt: skip
        """Compute the logits of tokens that follow those in the cache. `inputs` are those of `prompt_inputs`."""
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
