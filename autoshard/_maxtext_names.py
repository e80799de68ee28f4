"""MaxText's names of the values of a decoder layer, as aliases of the names here.

A word of `offload=` selects the step's own names first. A word that matches none of them may be one of MaxText's names,
and then it selects the value here. Some of MaxText's names stand for a part of such a value: `query_proj` is `qkv`, all
of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

MAXTEXT_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "residual": ("decoder_layer_input",),
        "qkv": ("query_proj", "key_proj", "value_proj", "qkv_proj"),
        "context": ("context",),
        "out_proj": ("out_proj",),
        "mlp_in": ("mlpwi", "mlpwi_0", "mlpwi_1"),
        "mlp_out": ("mlpwo",),
    }
)
"""Our name of a value -> its names in MaxText's `remat_policy: custom`, in the order of a layer."""


def aliased_names(selects: Callable[[str], bool]) -> tuple[str, ...]:
    """Return our names of the values of which a word selects one of MaxText's names.

    Args:
        selects: whether the word selects a name.

    >>> aliased_names("decoder_layer_input".__eq__)
    ('residual',)
    """
    return tuple(ours for ours, theirs in MAXTEXT_NAMES.items() if any(map(selects, theirs)))
