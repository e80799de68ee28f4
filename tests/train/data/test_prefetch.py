"""Batches on the devices: in order, errors and all, each its own copy."""

import threading
from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.train.data.prefetch import Prefetcher, place_batch


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_batches_come_in_order_and_the_thread_ends() -> None:
    with Prefetcher(range(20), lambda n: n * n, depth=3) as ready:
        assert list(ready) == [n * n for n in range(20)]
    assert not prefetch_threads()


def test_the_thread_ends_with_a_run_that_stops_early() -> None:
    with Prefetcher(iter(int, 1), lambda n: n, depth=2) as ready:
        assert next(iter(ready)) == 0
        assert prefetch_threads()
    assert not prefetch_threads()


def test_no_more_is_made_than_may_wait() -> None:
    made: list[int] = []
    waiting = threading.Event()

    def make(n: int) -> int:
        made.append(n)
        if n == 3:
            waiting.set()
        return n

    with Prefetcher(range(100), make, depth=2) as ready:
        assert next(iter(ready)) == 0
        waiting.wait(5)
    # One was taken, two wait, one more was made and has no place yet.
    assert len(made) <= 4


def test_an_error_is_raised_where_its_batch_would_have_been() -> None:
    def make(n: int) -> int:
        if n == 2:
            raise OSError("disk on fire")
        return n

    seen = []
    with Prefetcher(range(5), make) as ready, pytest.raises(OSError, match="disk on fire"):
        for batch in ready:
            seen.append(batch)
    assert seen == [0, 1] and not prefetch_threads()


@pytest.mark.parametrize(
    "spec", [PartitionSpec(), PartitionSpec("data"), PartitionSpec(("data", "model")), PartitionSpec("data", "model")]
)
def test_a_batch_is_a_copy_of_what_was_handed_over(mesh8: Mesh, spec: PartitionSpec) -> None:
    """`device_put` on CPU can alias an aligned NumPy buffer: the next batch may be written into the same one."""
    buffer = np.zeros(8 * 64 + 16, np.int32)
    start = (-buffer.ctypes.data % 64) // 4
    rows = buffer[start : start + 8 * 64].reshape(8, 64)
    rows[:] = np.arange(8 * 64).reshape(8, 64)
    kept = rows.copy()
    shapes = {"x": jax.ShapeDtypeStruct((8, 64), np.int32)}
    placed = place_batch(lambda r: {"x": rows[r.start : r.stop]}, shapes, {"x": NamedSharding(mesh8, spec)})
    rows[:] = -1
    np.testing.assert_array_equal(placed["x"], kept)
    assert placed["x"].sharding == NamedSharding(mesh8, spec)


def test_only_the_rows_that_are_needed_are_made(mesh_of: Callable[..., Mesh]) -> None:
    asked: list[range] = []

    def rows(wanted: range) -> dict[str, np.ndarray]:
        asked.append(wanted)
        return {"x": np.zeros((len(wanted), 4)), "y": np.zeros((len(wanted), 4))}

    sharding = NamedSharding(mesh_of(data=4), PartitionSpec("data"))
    shapes = dict.fromkeys("xy", jax.ShapeDtypeStruct((8, 4), np.float32))
    place_batch(rows, shapes, dict.fromkeys("xy", sharding))
    assert sorted((r.start, r.stop) for r in asked) == [(0, 2), (2, 4), (4, 6), (6, 8)]
