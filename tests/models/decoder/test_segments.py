"""Segments of layers: which patterns repeat."""

import sys

import pytest

from autoshard.models.decoder import LayerKind
from autoshard.models.decoder.segments import segments_of

A, B, C = LayerKind(), LayerKind(window=4), LayerKind(experts=True)


@pytest.mark.parametrize(
    "kinds, expected",
    [
        ([A] * 5, [(1, 5)]),
        ([B, A] * 3, [(2, 3)]),
        ([B, B, A] * 4 + [B] * 2, [(3, 4), (1, 2)]),
        ([A] * 3 + [C] * 6, [(1, 3), (1, 6)]),
        ([A, B, C], [(1, 1)] * 3),
        ([A], [(1, 1)]),
    ],
    ids=["same", "in turn", "with a rest", "two kinds", "no repetition", "one layer"],
)
def test_patterns(kinds, expected):
    segments = segments_of(kinds)
    assert [(len(s.pattern), s.repeats) for s in segments] == expected
    layers = [(s.layer(r, p), s.pattern[p]) for s in segments for r in range(s.repeats) for p in range(len(s.pattern))]
    assert layers == list(enumerate(kinds))


def _lines_run(kinds):
    """Return how many lines of Python `segments_of` runs."""
    lines = 0

    def count(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        segments_of(kinds)
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("pattern", [[A], [B, B, A]], ids=["same", "in turn"])
def test_work_is_linear_in_layers(pattern):
    assert _lines_run(pattern * 800) < 1.5 * 8 * _lines_run(pattern * 100)
