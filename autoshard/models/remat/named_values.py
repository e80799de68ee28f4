"""The named values of a decoder layer, which a remat policy keeps, moves to the host or recomputes one by one.

A name only has an effect if the backward pass of its layer reads the value. It does not read the result of the layer:
the next layer reads that as its own `residual`. For this reason `mlp_out` moves nothing in a layer whose MLP ends in
the residual stream. In experts with a capacity it moves the value, because the gates' gradient reads it.

The experts of `dispatch="dropless"` are one operator that recomputes its hidden values. They have no named values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import jax
from jax.ad_checkpoint import checkpoint_name

from autoshard._maxtext_names import MAXTEXT_NAMES
from autoshard._shown import shown


@shown
@dataclass(frozen=True)
class NamedValue:
    """A named value of a layer.

    Attributes:
        meaning: what it is.
        maxtext: the names of the same values in MaxText's `remat_policy: custom`.
    """

    meaning: str
    maxtext: tuple[str, ...]


_MEANINGS = {
    "residual": "the layer's input `[batch, seq, width]`",
    "qkv": "queries, keys and values as attention takes them: projected, and rotated if positions are rotary",
    "context": "the result of attention before its output projection, and what blockwise attention keeps of the "
    "softmax",
    "out_proj": "the result of attention's output projection",
    "mlp_in": "the results of the MLP's first products, `up` and `gate`, before the activation function",
    "mlp_out": "the result of the MLP's last product, `down`",
}

NAMED_VALUES: Mapping[str, NamedValue] = MappingProxyType(
    {name: NamedValue(meaning, MAXTEXT_NAMES[name]) for name, meaning in _MEANINGS.items()}
)
"""The named values, in the order in which a layer computes them."""


def named(x: jax.Array, name: str) -> jax.Array:
    """Return `x` under a name of `NAMED_VALUES`. Outside of `jax.checkpoint` the name has no effect."""
    assert name in NAMED_VALUES
    return checkpoint_name(x, name)
