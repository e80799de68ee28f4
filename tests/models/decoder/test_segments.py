"""Segments of layers: which patterns repeat."""

import time

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


@pytest.mark.parametrize("pattern, repeats", [([A], 12_000), ([B, B, A], 4000)], ids=["same", "in turn"])
def test_time_grows_with_the_number_of_layers_alone(pattern, repeats):
    started = time.process_time()
    (segment,) = segments_of(pattern * repeats)
    assert (list(segment.pattern), segment.repeats) == (pattern, repeats)
    assert time.process_time() - started < 1  # takes 0.02 seconds, and minutes if the time grows with the square
