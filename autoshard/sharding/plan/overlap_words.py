"""The table of `overlap=`: for parameters by path, which collectives may run beside compute.

    {"experts/*": {"gather": "off"}, "attention/*": {"gather": "on", "reduce": "on", "matmul": "off"}}

As text, `experts/*:gather=off`; several kinds are joined by commas, several modules by spaces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoshard._typed import short_repr
from autoshard.errors import PlanError

ON, OFF = "on", "off"
GATHER, REDUCE, MATMUL = "gather", "reduce", "matmul"
KINDS = {
    GATHER: "gathers of a parameter where an operator uses it",
    REDUCE: "reductions of a parameter's gradient",
    MATMUL: "collective matmul: a product with a parameter runs in parts, beside permutes of what it gathers or sums",
}

Overlap = dict[str, dict[str, str]]
OverlapRequest = str | Sequence[str] | Mapping[str, Mapping[str, str]]
"""A table such as `{"experts/*": {"gather": "off"}}`, or its text, or lines of its text."""

_FORM = "give {path: {kind: 'on' or 'off'}}, such as {'experts/*': {'gather': 'off'}}"


def read_overlap(overlap: Any) -> Overlap:
    """Return the table of `overlap=`, which may be given as text or a sequence of texts; empty for None.

    Raises:
        PlanError: it has another form, or a kind or word that does not exist. The message lists those that do.

    Example:
        >>> read_overlap("experts/*:gather=off */wq:gather=on,matmul=on")
        {'experts/*': {'gather': 'off'}, '*/wq': {'gather': 'on', 'matmul': 'on'}}
    """
    if overlap is None:
        return {}
    if isinstance(overlap, str):
        overlap = overlap.split()
    pairs = _mapping_pairs(overlap) if isinstance(overlap, Mapping) else _text_pairs(overlap)
    table: Overlap = {}
    for path, kind, word in pairs:
        if kind not in KINDS:
            raise PlanError(f"overlap of '{path}' has no kind {short_repr(kind)}; the kinds are {', '.join(KINDS)}")
        if word not in (ON, OFF):
            raise PlanError(f"overlap of '{path}': {kind} is {short_repr(word)}; it must be 'on' or 'off'")
        if table.setdefault(path, {}).setdefault(kind, word) != word:
            raise PlanError(f"overlap of '{path}': {kind} is both 'on' and 'off'; give it once")
    return table


def overlap_text(overlap: Mapping[str, Mapping[str, str]]) -> str:
    """The table as text.

    >>> overlap_text({"experts/*": {"gather": "off"}})
    'experts/*:gather=off'
    """
    return " ".join(f"{path}:{','.join(f'{k}={w}' for k, w in words.items())}" for path, words in overlap.items())


def _mapping_pairs(overlap: Mapping[Any, Any]) -> list[tuple[str, Any, Any]]:
    pairs = []
    for path, words in overlap.items():
        if not isinstance(path, str) or not path or not isinstance(words, Mapping) or not words:
            raise PlanError(f"overlap has {short_repr(path)}: {short_repr(words)}; {_FORM}")
        pairs += [(path, kind, word) for kind, word in words.items()]
    return pairs


def _text_pairs(overlap: Any) -> list[tuple[str, Any, Any]]:
    if not isinstance(overlap, Sequence) or not all(isinstance(text, str) for text in overlap):
        raise PlanError(f"overlap is {short_repr(overlap)}; {_FORM}, or text such as 'experts/*:gather=off'")
    pairs = []
    for text in (word for each in overlap for word in each.split()):
        path, colon, words = text.rpartition(":")
        kinds = [word.partition("=") for word in words.split(",")]
        if not (path and colon and all(kind and equals and word for kind, equals, word in kinds)):
            raise PlanError(
                f"overlap has {short_repr(text)}; write PATH:KIND=on or off, such as 'experts/*:gather=off'"
            )
        pairs += [(path, kind, word) for kind, _, word in kinds]
    return pairs
