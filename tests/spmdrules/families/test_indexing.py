"""The table of operators that address elements by values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard.spmdrules import Shard
from tests.spmdrules.rows import Row, below, distinct, f32, of

TABLE = f32(8, 4)
ROWS_OF_8 = below(8, 4)
_MOVED = "linear 0; moves 0"
_OUTSIDE = np.array([-3, 7, 8, 0, 2, 100, 5, -1], np.int32)


def _take(axis=0, **options):
    return lambda x, i: jnp.take(x, i, axis, **options)


def _window(x, starts):
    numbers = lax.GatherDimensionNumbers((1, 2), (), (0, 1))
    return lax.gather(x, starts, numbers, (3, 4), mode="clip")


def _batched_rows(x, i):
    return jax.vmap(lambda x, i: x[i])(x, i)


def _squared_along_the_middle(x, i):
    return jax.grad(lambda x: (jnp.take_along_axis(x, i, 1) ** 2).sum())(x)


def _at(method, axis=0, **options):
    index = (slice(None),) * axis
    return lambda x, i, u: getattr(x.at[(*index, i)], method)(u, **options)


def _batched_at(method):
    return jax.vmap(lambda x, i, u: getattr(x.at[i], method)(u))


def _add_window(x, starts, updates):
    numbers = lax.ScatterDimensionNumbers((1, 2), (), (0, 1))
    return lax.scatter_add(x, starts, updates, numbers, mode="clip")


_ROWS_OF_4 = f32(4, 4)
ROWS = [
    Row("gather", _take(mode="clip"), (TABLE, ROWS_OF_8), f"v d, b 1 -> b d; index v; {_MOVED}"),
    Row("gather", _take(mode="fill"), (TABLE, _OUTSIDE), f"v d, b 1 -> b d; index v; {_MOVED}", "fill"),
    Row("gather", _take(mode="fill", fill_value=3.0), (TABLE, _OUTSIDE), "v d, b 1 -> b d; index v", "fill with 3"),
    Row("gather", _take(mode="fill"), (of(jnp.int32, 8, 4), _OUTSIDE), "v d, b 1 -> b d; index v", "fill of integers"),
    Row("gather", _take(mode="clip"), (TABLE, _OUTSIDE), f"v d, b 1 -> b d; index v; {_MOVED}", "clip"),
    Row("gather", _take(1, mode="clip"), (f32(4, 8, 4), below(8, 4, 4)),
        f"d v d1, b b1 1 -> d b b1 d1; index v; {_MOVED}", "of the middle"),
    Row("gather", _take(mode="clip"), (of(jnp.bool_, 8, 4), ROWS_OF_8), f"w d, b 1 -> b d; whole w; {_MOVED}", "bools"),
    Row("gather", lambda x, i: jnp.take_along_axis(x, i, 1), (f32(4, 8), below(8, 4, 4)),
        f"b v, b b1 1 -> b b1; index v; {_MOVED}", "along an axis"),
    Row("gather", lambda x, i: jnp.take_along_axis(x, i, 1), (f32(4, 8, 6), below(8, 4, 2, 6)),
        f"b v b2, b b1 b2 1 -> b b1 b2; index v; {_MOVED}", "along the middle"),
    Row("scatter-add", _squared_along_the_middle, (f32(4, 8, 6), below(8, 4, 2, 6)),
        "b v b1, b n b1 1, b n b1 -> b v b1; reduce n; index v; linear 0 2", "along the middle"),
    Row("gather", _batched_rows, (f32(4, 8, 4), below(8, 4, 4)),
        f"b v d, b b1 1 -> b b1 d; index v; {_MOVED}", "batched"),
    Row("gather", lambda x, i, j: x[i, j], (f32(8, 4), below(8, 4), below(4, 4)),
        f"v v1, b w -> b; whole w; index v v1; {_MOVED}", "points"),
    Row("gather", _window, (f32(8, 4), below(5, 4, 2)),
        f"u d, b w1 -> b w d; whole w1 w; index u; {_MOVED}", "windows"),
    Row("gather", jax.vmap(lambda x, i: lax.dynamic_slice(x, (i,), (3,))), (f32(4, 8), below(6, 4)),
        f"b u, b 1 -> b w; whole w; index u; {_MOVED}", "windows of a batch"),
    Row("gather", jax.vmap(lambda x, i: lax.dynamic_slice(x, i, (3, 2)), (None, 0)), (f32(8, 4), below(4, 4, 2)),
        f"u u1, b w2 -> b w w1; whole w2 w w1; index u u1; {_MOVED}", "windows both ways"),
    Row("gather", _take(mode="clip"), (TABLE, below(8, 4, dtype=np.uint8)),
        f"w d, b 1 -> b d; whole w; {_MOVED}", "small indices"),
    Row("scatter-add", _at("add"), (TABLE, ROWS_OF_8, _ROWS_OF_4),
        "v d, n 1, n d -> v d; reduce n; index v; linear 0 2"),
    Row("scatter-add", _at("add", mode="clip"), (TABLE, _OUTSIDE, f32(8, 4)),
        "v d, n 1, n d -> v d; reduce n; index v; linear 0 2", "clip"),
    Row("scatter-add", _at("add", mode="drop"), (TABLE, _OUTSIDE, f32(8, 4)),
        "v d, n 1, n d -> v d; reduce n; index v; linear 0 2", "drop"),
    Row("scatter-add", _batched_at("add"), (f32(4, 8, 4), below(8, 4, 4), f32(4, 4, 4)),
        "b v d, b n 1, b n d -> b v d; reduce n; index v; linear 0 2", "batched"),
    Row("scatter-add", lambda x, i, j, u: x.at[i, j].add(u), (f32(8, 4), below(8, 4), below(4, 4), f32(4)),
        "v v1, n w, n -> v v1; reduce n; whole w; index v v1; linear 0 2", "points"),
    Row("scatter-add", _at("add", 1), (f32(4, 8), ROWS_OF_8, f32(4, 4)),
        "d v, n 1, d n -> d v; reduce n; index v; linear 0 2", "of columns"),
    Row("scatter-add", _add_window, (f32(8, 4), below(5, 4, 2), f32(4, 3, 4)),
        "u d, n w1, n w d -> u d; reduce n; whole w1 w; index u; linear 0 2", "windows"),
    Row("scatter", jax.vmap(lambda x, u, i: lax.dynamic_update_slice(x, u, (i,))), (f32(4, 8), f32(4, 3), below(6, 4)),
        "b u, b 1, b w -> b u; whole w; index u; linear 0 2; moves 0 2", "windows of a batch"),
    Row("scatter-sub", _at("subtract"), (TABLE, ROWS_OF_8, _ROWS_OF_4),
        "v d, n 1, n d -> v d; reduce n; index v; linear 0 2"),
    Row("scatter-mul", _at("multiply", unique_indices=True), (TABLE, distinct(8, 4), _ROWS_OF_4),
        "v d, n 1, n d -> v d; reduce n:mul; index v; linear 0"),
    Row("scatter-min", _at("min"), (TABLE, ROWS_OF_8, _ROWS_OF_4), "v d, n 1, n d -> v d; reduce n:min; index v"),
    Row("scatter-max", _at("max"), (TABLE, ROWS_OF_8, _ROWS_OF_4), "v d, n 1, n d -> v d; reduce n:max; index v"),
    Row("scatter", _at("set"), (TABLE, distinct(8, 4), _ROWS_OF_4),
        "v d, n 1, n d -> v d; whole n; index v; linear 0 2; moves 0 2"),
    Row("scatter-mul", _batched_at("multiply"), (f32(4, 8, 4), below(8, 4, 4), f32(4, 4, 4)),
        "b v d, b n 1, b n d -> b v d; reduce n:mul; index v; linear 0", "batched"),
    Row("scatter-max", _batched_at("max"), (f32(4, 8, 4), below(8, 4, 4), f32(4, 4, 4)),
        "b v d, b n 1, b n d -> b v d; reduce n:max; index v", "batched"),
    Row("scatter", _batched_at("set"), (f32(4, 8, 4), np.stack([distinct(8, 4)] * 4), f32(4, 4, 4)),
        "b v d, b n 1, b n d -> b v d; whole n; index v; linear 0 2; moves 0 2", "batched"),
    Row("scatter", lambda x, i, u: x.at[i, i].set(u), (f32(8, 8), np.arange(8, dtype=np.int32), f32(8)),
        "v v1, n w, n -> v v1; whole n w; index v v1; linear 0 2; moves 0 2", "diagonal"),
    Row("scatter", lambda x, u: x.at[..., -1, -1].set(u), (f32(4, 8, 8), f32(4)),
        "d v v1, w, d -> d v v1; whole w; index v v1; linear 0 2; moves 0 2", "one point"),
    Row("scatter", lambda x, i: x.at[i].apply(jnp.sin), (TABLE, distinct(8, 4)),
        "v d, n 1, n d -> v d; whole n; index v", "apply"),
    Row("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, 0), (3, 4)), (TABLE, np.int32(4)),
        f"v a, [], [] -> w a; whole w; index v; {_MOVED}"),
    Row("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, i), (1, 2)), (TABLE, np.int32(1)),
        f"v v1, [], [] -> 1 w; whole w; index v v1; {_MOVED}", "of both"),
    Row("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, 0), (3, 4)), (of(jnp.bool_, 8, 4), np.int32(4)),
        f"w a, [], [] -> w1 a; whole w w1; {_MOVED}", "bools"),
    Row("dynamic_update_slice", lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)), (TABLE, f32(3, 4), np.int32(3)),
        "v a, w a, [], [] -> v a; whole w; index v; linear 0 1; moves 0 1"),
    Row("dynamic_update_slice", lambda x, u, i: lax.dynamic_update_slice(x, u, (i, i)), (TABLE, f32(1, 2), np.int32(1)),
        "v v1, 1 w, [], [] -> v v1; whole w; index v v1; linear 0 1; moves 0 1", "of both"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_expected_map(row):
    assert row.rule().text == row.expected


def _shard_results(row, operands, factor, count, sharded):
    """Yields the result of each shard's body, with `factor` sharded; only operand `sharded` has it, in dimension 0."""
    rule = row.rule()
    assert rule.body is not None
    for i in range(count):
        shards = [np.split(x, count)[i] if k == sharded else x for k, x in enumerate(operands)]
        yield np.asarray(rule.body(Shard(rule, {factor: count}, {factor: i}), *shards))


@pytest.mark.parametrize("mode", ["fill", "clip"])
def test_positions_out_of_bounds_are_filled_or_clipped_once(mode):
    row = next(r for r in ROWS if r.primitive == "gather" and r.note == mode)
    x = np.arange(32, dtype=np.float32).reshape(8, 4) - 7.5
    expected = row.fn(x, _OUTSIDE)
    positions = np.where(_OUTSIDE < 0, _OUTSIDE + 8, _OUTSIDE) if mode == "fill" else _OUTSIDE
    actual = sum(_shard_results(row, [x, positions[:, None]], "v", 4, 0))
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("mode", ["drop", "clip"])
def test_updates_out_of_bounds_are_dropped_or_clipped(mode):
    row = next(r for r in ROWS if r.primitive == "scatter-add" and r.note == mode)
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    updates = np.arange(32, dtype=np.float32).reshape(8, 4) ** 2
    positions = np.where(_OUTSIDE < 0, _OUTSIDE + 8, _OUTSIDE)  # `at` counts negative ones from the end
    actual = np.concatenate(list(_shard_results(row, [x, positions[:, None], updates], "v", 2, 0)))
    np.testing.assert_array_equal(actual, row.fn(jnp.asarray(x), _OUTSIDE, updates))
