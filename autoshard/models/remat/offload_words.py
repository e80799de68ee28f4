"""The words of `offload`: which named values of a layer wait in the host's memory.

    offload = "none" | "auto" | word {("+" | ",") word}
    word    = name ["@" slice]                            a slice over the layers: "residual@::2" is every second layer

A name is ours or MaxText's (`named_values.NAMED_VALUES`). Some of MaxText's names stand for a part of one of our
values: `query_proj` is `qkv`, all of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from autoshard.models.remat.named_values import NAMED_VALUES
from autoshard.models.remat.policies import HOST

AUTO, NONE = "auto", "none"
FULL = "full"  # of `policies.REMAT_POLICIES`: all values are recomputed
_AT = "@"


def offloaded_names(offload: str) -> tuple[str, ...]:
    """Return our names of the values that a text other than `auto` moves to the host, in the order of a layer.

    Args:
        offload: the text.

    Raises:
        ValueError: a name is unknown; the message lists the known ones.

    >>> offloaded_names("decoder_layer_input, query_proj, key_proj, value_proj")
    ('residual', 'qkv')
    >>> offloaded_names("none")
    ()
    """
    if offload.strip() == NONE:
        return ()
    ours = {also: name for name, value in NAMED_VALUES.items() for also in (name, *value.maxtext)}
    given = [_split(part)[0] for part in re.split(r"[+,]", offload)]
    unknown = [name for name in given if name not in ours]
    if unknown:
        known = ", ".join(f"{name} ({', '.join(v.maxtext)})" if v.maxtext != (name,) else name
                          for name, v in NAMED_VALUES.items())  # fmt: skip
        raise ValueError(
            f"offload is {offload!r}; {unknown[0]!r} is not a named value. Give {NONE}, {AUTO}, or names of a layer's "
            f"values joined by '+': {known}"
        )
    found = {ours[name] for name in given}
    return tuple(name for name in NAMED_VALUES if name in found)


def selects_layers(offload: str) -> bool:
    """Return whether a text has slices over layers."""
    return _AT in offload


def offload_remat(offload: str, layers: int = 1, *, scan: bool = False) -> str:
    """Return the `remat` under which the named values wait on the host and all others are recomputed.

    Args:
        offload: words, not `auto` or `none`.
        layers: the number of layers, or of the groups of layers that are stacked, for words with slices.
        scan: whether the layers are stacked, and one scan runs over them.

    Raises:
        ValueError: a name is unknown, a slice is invalid, or stacked layers cannot differ as the slices say.

    >>> offload_remat("residual+qkv")
    'host:residual+qkv'
    >>> offload_remat("residual+qkv@::2", 8)
    'host:residual+qkv,host:residual'
    """
    if not selects_layers(offload):
        return f"{HOST}:{'+'.join(offloaded_names(offload))}"
    words = [part.strip() for part in re.split(r"[+,]", offload)]
    selected = [(name, _layers_of(word, written, layers)) for word in words for name, written in [_split(word)]]
    of_layer = [{name for name, some in selected if layer in some} for layer in range(layers)]
    policies = [f"{HOST}:{'+'.join(offloaded_names('+'.join(some)))}" if some else FULL for some in of_layer]
    period = _period(policies)
    if scan and period == layers > 1:
        raise ValueError(
            f"offload is {offload!r}, but the {layers} layers are one scan, in whose body layers can only differ "
            "periodically. Select layers with a step that divides their number, such as 'residual@::2', or set "
            "scan_layers=False to write them out"
        )
    return ",".join(policies[:period])


def _split(word: str) -> tuple[str, str | None]:
    name, at, written = (part.strip() for part in word.partition(_AT))
    return name, written if at else None


def _layers_of(word: str, written: str | None, layers: int) -> range:
    """The layers that a word selects."""
    if written is None:
        return range(layers)
    parts = written.strip("[] ").split(":")
    try:
        if not 2 <= len(parts) <= 3:
            raise ValueError
        found = range(layers)[slice(*(int(part) if part.strip() else None for part in parts))]
    except ValueError:
        raise ValueError(
            f"offload has {word!r}; write a slice over the layers after the name, such as 'residual@::2' for every "
            "second layer or 'residual@:16' for the first 16"
        ) from None
    if not found:
        raise ValueError(f"offload has {word!r}, which selects none of {layers} layers; write another slice")
    return found


def _period(policies: Sequence[str]) -> int:
    """The period of the policies: the smallest number of layers after which they repeat."""
    return next(
        n for n in range(1, len(policies) + 1)
        if len(policies) % n == 0 and all(p == policies[k % n] for k, p in enumerate(policies))
    )  # fmt: skip
