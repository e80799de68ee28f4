"""The words of `offload` for the models of this package. They say what waits in the host's memory.

    offload = "none" | "auto" | word {("+" | ",") word}
    word    = "optimizer" | pattern ["@" slice]           a slice over the layers: "residual@::2" is every second layer

A pattern is a name or a glob over names, such as `mlp_*`. A name is one of this package or of MaxText
(`named_values.NAMED_VALUES`). Some of MaxText's names stand for a part of a value here. They select the whole value:
`query_proj` selects all of `qkv`. `optimizer` is the optimizer's state. The planner moves it. The layers move the named
values.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from autoshard._maxtext_names import aliased_names
from autoshard.models.remat.named_values import NAMED_VALUES
from autoshard.models.remat.policies import HOST
from autoshard.sharding.offload.layer_words import LayerWord, read_layer_word
from autoshard.sharding.offload.words import AUTO, NONE, OPTIMIZER

FULL = "full"  # of `policies.REMAT_POLICIES`: all values are recomputed
WRITTEN_OUT = "scan_layers=False"  # the setting that writes layers out


def moves_optimizer(offload: str) -> bool:
    """Return whether a text has the word `optimizer`.

    >>> moves_optimizer("residual, optimizer")
    True
    """
    return OPTIMIZER in _parts(offload)


def names_values(offload: str) -> bool:
    """Return whether a text, which is not `auto`, names values of a layer.

    >>> names_values("residual, optimizer"), names_values("optimizer")
    (True, False)
    """
    return any(part not in (NONE, OPTIMIZER) for part in _parts(offload))


def offloaded_names(offload: str) -> tuple[str, ...]:
    """Return the names of the values of a layer that a text moves to the host, in the order of a layer.

    The names are those of this package.

    Args:
        offload: the text; not `auto`.

    Raises:
        ValueError: a name is unknown, and the message lists the known ones; a slice is invalid; or `none` or `auto`
            stands beside other words.

    >>> offloaded_names("decoder_layer_input, query_proj, key_proj, value_proj, optimizer")
    ('residual', 'qkv')
    >>> offloaded_names("none")
    ()
    """
    found = {name for _, names in _read(offload) for name in names}
    return tuple(name for name in NAMED_VALUES if name in found)


def value_patterns(offload: str) -> tuple[str, ...]:
    """Return the words that name values of a layer, as they are written, without their slices.

    >>> value_patterns("mlp_*, query_proj@::2, optimizer")
    ('mlp_*', 'query_proj')
    """
    return tuple(dict.fromkeys(word.pattern for word, _ in _read(offload)))


def globbed_names(offload: str) -> tuple[str, ...]:
    """Return the names of `offloaded_names` that only globs select. Such a name may move nothing.

    >>> globbed_names("mlp_*, qkv")
    ('mlp_in', 'mlp_out')
    """
    written = {name for word, names in _read(offload) if not word.is_glob for name in names}
    return tuple(name for name in offloaded_names(offload) if name not in written)


def selects_layers(offload: str) -> bool:
    """Return whether a text has slices over layers."""
    return "@" in offload


def offload_remat(offload: str, layers: int = 1, *, scan: bool = False, written_out: str = WRITTEN_OUT) -> str:
    """Return the `remat` under which the named values wait on the host and all others are recomputed.

    Args:
        offload: words of which at least one names values.
        layers: the number of layers, or of the groups of layers that are stacked, for words with slices.
        scan: whether the layers are stacked, and one scan runs over them.
        written_out: the setting that writes layers out, for the message.

    Raises:
        ValueError: a name is unknown, a slice is invalid, or stacked layers cannot differ as the slices say.

    >>> offload_remat("residual+qkv")
    'host:residual+qkv'
    >>> offload_remat("residual+qkv@::2", 8)
    'host:residual+qkv,host:residual'
    """
    words = _read(offload)
    if not selects_layers(offload):
        return f"{HOST}:{'+'.join(offloaded_names(offload))}"
    selected = [(names, _layers_of(word, layers)) for word, names in words]
    of_layer = [{name for names, some in selected if layer in some for name in names} for layer in range(layers)]
    policies = [
        f"{HOST}:{'+'.join(name for name in NAMED_VALUES if name in some)}" if some else FULL for some in of_layer
    ]
    period = _period(policies)
    if scan and period == layers > 1:
        raise ValueError(
            f"offload is {offload!r}, but the {layers} layers are one scan, in whose body layers can only differ "
            "periodically. Select layers with a step that divides their number, such as 'residual@::2', or write the "
            f"layers out with {written_out}"
        )
    return ",".join(policies[:period])


def _parts(offload: str) -> list[str]:
    return [part.strip() for part in re.split(r"[+,]", offload)]


def _read(offload: str) -> list[tuple[LayerWord, tuple[str, ...]]]:
    """Return the words that name values of a layer, each with the names in this package."""
    parts = _parts(offload)
    if parts == [NONE]:
        return []
    if len(parts) > 1 and (alone := next((word for word in (NONE, AUTO) if word in parts), None)):
        more = f". '{AUTO}' may move the optimizer's state, too" if alone == AUTO and OPTIMIZER in parts else ""
        raise ValueError(
            f"offload is {offload!r}; '{alone}' must stand alone{more}. Leave it out, or leave out the other words"
        )
    return [_named(part, offload) for part in parts if part != OPTIMIZER]


def _named(part: str, offload: str) -> tuple[LayerWord, tuple[str, ...]]:
    word = read_layer_word(part)
    names = tuple(filter(word.names, NAMED_VALUES)) or aliased_names(word.names)
    if not names:
        known = ", ".join(f"{name} ({', '.join(v.maxtext)})" if v.maxtext != (name,) else name
                          for name, v in NAMED_VALUES.items())  # fmt: skip
        what = (
            f"{word.pattern!r} is not a named value"
            if word.pattern
            else "it has an empty word, which is not a named value"
        )
        raise ValueError(
            f"offload is {offload!r}; {what}. Give {NONE}, {AUTO}, {OPTIMIZER}, or "
            f"names of a layer's values joined by '+': {known}"
        )
    return word, names


def _layers_of(word: LayerWord, layers: int) -> range:
    """The layers that a word selects."""
    found = word.selects(layers)
    if not found:
        raise ValueError(
            f"offload has {word.text!r}, which selects none of {layers} layers, numbered from 0; "
            f"'{word.pattern}@:{layers}' selects all"
        )
    return found


def _period(policies: Sequence[str]) -> int:
    """The period of the policies: the smallest number of layers after which they repeat."""
    return next(
        n for n in range(1, len(policies) + 1)
        if len(policies) % n == 0 and all(p == policies[k % n] for k, p in enumerate(policies))
    )  # fmt: skip
