"""Segments are equal exactly where all terms of a mask are true."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.sharding.rewrite.masks.array_masks import Row, Term
from autoshard.sharding.rewrite.masks.segment_ids import SegmentMask, ranks
from autoshard.sharding.rewrite.values import Value

BATCH, QUERIES, KEYS = (0,), (1,), (2,)
SHAPE = (3, 5, 7)
LOWEST = np.iinfo(np.int32).min  # no number is special


def row(name: str, axis: Any) -> tuple[Row, np.ndarray]:
    seed = sum(map(ord, name))
    size = SHAPE[1] if axis == QUERIES else SHAPE[2]
    base = Value("input", (), None, number=seed)
    values = np.array([LOWEST, LOWEST + 1, -1, 0])[np.random.default_rng(seed).integers(0, 4, (SHAPE[0], size))]
    x = values > -1 if name.startswith("pad") else values.astype(np.int32)
    return Row(base, (BATCH, axis), base, (BATCH, axis)), x


def equal(name: str) -> tuple[list[tuple[Row, np.ndarray]], Any]:
    rows = [row(f"{name} q", QUERIES), row(f"{name} k", KEYS)]
    return rows, (Term("equal", tuple(r for r, _ in rows)), rows[0][1][:, :, None] == rows[1][1][:, None])


def padding(kind: Any, is_positive: bool) -> tuple[list[tuple[Row, np.ndarray]], Any]:
    found, x = row(f"pad {kind}", QUERIES if kind == "queries" else KEYS)
    seen = x == is_positive
    return [(found, x)], (Term(kind, (found,), is_positive), seen[:, :, None] if kind == "queries" else seen[:, None])


TERMS = {
    "one": [equal("a")],
    "two": [equal("a"), equal("b")],
    "padded": [equal("a"), padding("keys", True)],
    "all": [equal("a"), equal("b"), padding("keys", False), padding("queries", True)],
    "padding": [padding("keys", True)],
    "both paddings": [padding("keys", True), padding("queries", False)],
}


@pytest.mark.parametrize("name", TERMS)
def test_segments_are_equal_where_all_terms_are_true(name: str) -> None:
    mask = SegmentMask(tuple(term for _, (term, _) in TERMS[name]), (BATCH,), QUERIES, KEYS, SHAPE)
    arrays = [x for rows, _ in TERMS[name] for _, x in rows]
    queries, keys = mask.segments(*map(jnp.asarray, arrays))
    expected = np.broadcast_to(functools.reduce(np.logical_and, [seen for _, (_, seen) in TERMS[name]]), SHAPE)
    np.testing.assert_array_equal(np.asarray(queries)[:, :, None] == np.asarray(keys)[:, None], expected)


def test_ranks_are_equal_for_equal_rows_alone() -> None:
    rng = np.random.default_rng(0)
    pairs = [(rng.integers(0, 3, (4, 6)), rng.integers(0, 3, (4, 9))) for _ in range(2)]
    queries, keys = ranks([(jnp.asarray(a), jnp.asarray(b)) for a, b in pairs])
    expected = np.logical_and.reduce([a[:, :, None] == b[:, None] for a, b in pairs])
    np.testing.assert_array_equal(np.asarray(queries)[:, :, None] == np.asarray(keys)[:, None], expected)
    assert int(queries.min()) >= 0 and int(keys.min()) >= 0
