"""MaxText's names of the values of a decoder layer, and the names of this package for them.

A word of `offload=` selects names of the step first. If it matches none, it may be one of MaxText's names. Then it
selects the value that this package has for it. Some of MaxText's names stand for a part of that value: `query_proj`
selects all of `qkv`.
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
"""Name of a value in this package -> its names in MaxText's `remat_policy: custom`, in the order of a layer."""


def aliased_names(selects: Callable[[str], bool]) -> tuple[str, ...]:
    """Return the names in this package of the values that a word selects by one of MaxText's names.

    Args:
        selects: whether the word selects a name.

    >>> aliased_names("decoder_layer_input".__eq__)
    ('residual',)
    """
    return tuple(ours for ours, theirs in MAXTEXT_NAMES.items() if any(map(selects, theirs)))
