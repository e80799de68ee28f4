"""Results of attention over parts of the keys, combined exactly.

    out = sum_p out_p exp(lse_p - lse),    lse = log sum_p exp(lse_p)

`lse` is the log-sum-exp of a row of scores. Both arrays are float32 until all parts are combined.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from autoshard._shown import shown

# The log-sum-exp of a row without a visible key. It is finite, so that two such rows do not compute inf - inf.
UNSEEN = -1e30


@shown
class Partial(NamedTuple):
    """Attention over some of the keys.

    Attributes:
        out: the result, `[..., queries, features]`, float32.
        log_sum: the log-sum-exp of each row, `[..., queries]`, float32; `UNSEEN` where no key is visible.
    """

    out: jax.Array
    log_sum: jax.Array

    def where(self, condition: jax.Array) -> Partial:
        """Return this result if a scalar condition holds, else the result over no keys."""
        return Partial(jnp.where(condition, self.out, 0.0), jnp.where(condition, self.log_sum, UNSEEN))


def combined(a: Partial, b: Partial) -> Partial:
    """Return attention over the keys of both parts."""
    log_sum = jnp.logaddexp(a.log_sum, b.log_sum)
    of_a, of_b = (part.out * jnp.exp(part.log_sum - log_sum)[..., None] for part in (a, b))
    return Partial(of_a + of_b, log_sum)


def with_sinks(part: Partial, sinks: jax.Array) -> Partial:
    """Return attention with one more key in each row: a key without a value. Its score broadcasts to the rows."""
    log_sum = jnp.logaddexp(part.log_sum, sinks)
    return Partial(part.out * jnp.exp(part.log_sum - log_sum)[..., None], log_sum)
