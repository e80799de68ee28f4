"""The loss of the held-out set: a token-weighted mean, the same on every mesh."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax

from autoshard._shown import shown
from autoshard.train.data.prefetch import Prefetcher, place_batch
from autoshard.train.data.text_data import Source
from autoshard.train.program.planned_step import PlacedEvalStep
from autoshard.train.step.train_state import Tree


@shown
@dataclass(frozen=True)
class Evaluation:
    """The loss on the held-out set.

    Attributes:
        loss: Mean over its tokens, in nats per token; over its pairs of answers in preference training.
        tokens: Number of tokens, or of pairs.
        bits_per_byte: The loss in bits per byte of text; None if the text is unknown.
    """

    loss: float
    tokens: int
    bits_per_byte: float | None

    def metrics(self) -> dict[str, float]:
        """Return the values that are written to the metrics."""
        values = {"val_loss": self.loss}
        return values if self.bits_per_byte is None else values | {"val_bits_per_byte": self.bits_per_byte}


def evaluate(
    placed: PlacedEvalStep,
    state_parts: tuple[Tree, Tree, Tree],
    source: Source,
    *,
    batches: int = 0,
    prefetch: int = 2,
    after_batch: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Measure the loss over held-out batches. The sums are accumulated in double precision on the host.

    Args:
        placed: The evaluation step.
        state_parts: Parameters, frozen parameters and variables of the train state.
        source: The data.
        batches: Number of batches; 0 for all.
        prefetch: Batches loaded ahead.
        after_batch: Called after each batch.
    """

    def make(index: int) -> dict[str, jax.Array]:
        return place_batch(lambda rows: source.held_out_batch(index, rows), placed.batch_shapes, placed.batch_shardings)

    count = min(batches or source.held_out_batches, source.held_out_batches)
    loss, weight = 0.0, 0.0
    with Prefetcher(range(count), make, prefetch) as ready:
        for batch in ready:
            more_loss, more_weight = jax.device_get(placed.step(*state_parts, batch))
            loss, weight = loss + float(more_loss), weight + float(more_weight)
            after_batch()
    mean = loss / max(weight, 1.0)
    per_token = source.bytes_per_token
    return Evaluation(mean, int(weight), mean / math.log(2) / per_token if per_token else None)
