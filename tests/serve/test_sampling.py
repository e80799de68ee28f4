"""Each row's choice against plain NumPy, with settings of its own."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.errors import ConfigError
from autoshard.serve import sampling
from autoshard.serve.sampling import Sampling, Settings, choose, filtered, penalized

ROWS = [
    Sampling(), Sampling(1.0), Sampling(0.7, top_k=5), Sampling(1.3, top_p=0.6), Sampling(1.0, min_p=0.2),
    Sampling(0.9, top_k=9, top_p=0.8, min_p=0.05), Sampling(1.0, top_k=1), Sampling(1.0, top_p=1e-6),
    Sampling(1.0, top_k=1000, repetition_penalty=1.7),
]  # fmt: skip
VOCAB = 40
WIDE = [
    Sampling(1.0, top_k=20, top_p=0.9), Sampling(1.0, top_k=128), Sampling(1.0), Sampling(1.0, top_p=0.05),
    Sampling(1.0, top_p=0.7), Sampling(1.0, top_k=200, top_p=0.95), Sampling(1.0, top_k=129),
]  # fmt: skip


def kept(scores, row):
    """Returns which tokens `top_k`, `top_p` and `min_p` leave, for one row, token by token."""
    order = sorted(range(VOCAB), key=lambda n: -scores[n])
    order = order[: row.top_k] if 0 < row.top_k < VOCAB else order
    weights = np.exp(scores[order] - scores.max())
    weights /= weights.sum()
    nucleus, total = [], 0.0
    for n, weight in zip(order, weights, strict=True):
        if total < row.top_p or row.top_p >= 1:
            nucleus.append(n)
        total += weight
    floor = row.min_p * np.exp(scores.max())
    return {n for n in nucleus if np.exp(scores[n]) >= floor}


def test_filters_leave_the_tokens_that_plain_numpy_leaves():
    scores = np.random.default_rng(0).normal(0, 2, (len(ROWS), VOCAB)).astype(np.float32)
    found = np.asarray(jax.jit(filtered)(scores, Settings.of(ROWS, [0] * len(ROWS))))
    for row, before, after in zip(ROWS, scores, found, strict=True):
        left = {int(n) for n in np.flatnonzero(np.isfinite(after))}
        assert left == kept(before, row), row
        assert all(after[n] == before[n] for n in left)


def wide(vocab, spread, seed=4):
    """Returns scores of several rows, some of them equal."""
    scores = np.random.default_rng(seed).normal(0, spread, (len(WIDE), vocab)).astype(np.float32)
    scores[:, ::7] = np.round(scores[:, ::7])
    return scores


@pytest.mark.few(1)
@pytest.mark.parametrize("vocab", [16_384, 257])  # chunks of 256 tokens, or one chunk
@pytest.mark.parametrize("spread", [3.0, 0.1], ids=["few tokens are likely", "many tokens are likely"])
def test_candidates_leave_the_tokens_that_a_sort_of_all_leaves(vocab, spread, monkeypatch):
    scores, settings = wide(vocab, spread), Settings.of(WIDE, [0] * len(WIDE))
    # All rows; those for which the candidates may decide; two of these alone, because one row makes all rows be sorted.
    for rows in ([*range(len(WIDE))], [0, 1, 2, 3], [0], [1]):
        given = jax.tree.map(lambda x, rows=rows: x[np.array(rows)], (scores, settings))
        found = np.asarray(jax.jit(filtered)(*given))
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "CANDIDATES", vocab)
            expected = np.asarray(jax.jit(lambda *x: filtered(*x))(*given))
        assert np.isfinite(expected).any(axis=1).all()
        np.testing.assert_array_equal(found, expected)


def test_a_sharded_vocabulary_is_gathered_only_to_sort_it():
    vocab, rows = 65_536, 8
    mesh = jax.make_mesh((8,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    by_vocab = NamedSharding(mesh, PartitionSpec(None, "tp"))
    settings = Settings.of([Sampling(1.0, top_k=20, top_p=0.9)] * rows, [0] * rows)
    compiled = jax.jit(filtered, in_shardings=(by_vocab, None), out_shardings=by_vocab)
    text = compiled.lower(jax.ShapeDtypeStruct((rows, vocab), jnp.float32), settings).compile().as_text() or ""
    moving = {}  # computation -> sizes of the arrays that it moves between devices
    for one in re.split(r"\n(?=(?:ENTRY )?%)", text):
        shapes = re.findall(r"= \(?f32\[([\d,]+)\]\S* .*?(?:all-gather|all-to-all)\(", one)
        moving[one.split(" ")[0]] = [math.prod(map(int, shape.split(","))) for shape in shapes]
    moving = {name: sizes for name, sizes in moving.items() if sizes}
    by_sorting, by_candidates = sorted(moving.values(), key=max, reverse=True)  # the branches of the conditional
    assert max(by_candidates) <= rows * sampling.CHUNKS * sampling.CANDIDATES < rows * vocab // 4
    assert max(by_sorting) >= rows * vocab // 8  # so the search above finds gathers of this size


def test_penalty_divides_positive_and_multiplies_negative_scores_of_seen_tokens():
    scores = np.array([[2.0, -2.0, 3.0, -3.0]], np.float32)
    seen = np.array([[True, True, False, False]])
    found = penalized(jnp.asarray(scores), jnp.asarray(seen), jnp.array([2.0]))
    assert found.tolist() == [[1.0, -4.0, 3.0, -3.0]]


def test_draws_follow_the_probabilities():
    draws = 4000
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    settings = Settings.of([Sampling(1.0, seed=3)] * draws, [*range(draws)])
    found = jax.jit(choose)(
        np.tile(logits, (draws, 1)), settings, np.zeros((draws, 4), bool), np.zeros(draws, np.int32)
    )
    shares = np.bincount(found, minlength=4) / draws
    assert np.abs(shares - [0.5, 0.3, 0.15, 0.05]).max() < 0.03  # 4 standard deviations


def test_a_row_draws_the_same_alone_and_beside_others():
    logits = np.random.default_rng(1).normal(0, 1, (4, VOCAB)).astype(np.float32)
    rows, positions = [Sampling(1.0, seed=n // 2) for n in range(4)], np.array([5, 6, 5, 6], np.int32)
    seen = np.zeros((4, VOCAB), bool)
    run = jax.jit(choose)
    together = np.asarray(run(logits, Settings.of(rows, [7, 8, 9, 7]), seen, positions))
    for n, number in enumerate([7, 8, 9, 7]):
        one = slice(n, n + 1)
        assert int(run(logits[one], Settings.of(rows[one], [number]), seen[one], positions[one])[0]) == together[n]
    flat = jnp.zeros((64, VOCAB))
    same, number, place = [Sampling(1.0)] * 64, [0] * 64, np.zeros(64, np.int32)
    drawn = [
        np.asarray(run(flat, Settings.of(settings, numbers), np.zeros((64, VOCAB), bool), positions))
        for settings, numbers, positions in (
            (same, number, place), (same, number, np.arange(64, dtype=np.int32)), (same, [*range(64)], place),
            ([Sampling(1.0, seed=n) for n in range(64)], number, place),
        )
    ]  # fmt: skip
    assert [len(set(found.tolist())) > 10 for found in drawn] == [False, True, True, True]


def test_invalid_settings_are_named_together():
    with pytest.raises(ConfigError, match="temperature is -1.*top_k is -2.*top_p is 0.*min_p is 2.*seed is -1"):
        Sampling(-1, top_k=-2, top_p=0, min_p=2, seed=-1)
