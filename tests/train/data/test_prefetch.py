"""Prefetched batches come in order, pass on errors, and are copies."""

import threading
from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.errors import AutoshardWarning
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


def test_no_more_batches_are_made_than_fit_the_queue() -> None:
    steps_made: list[int] = []
    waiting = threading.Event()

    def make(n: int) -> int:
        steps_made.append(n)
        if n == 3:
            waiting.set()
        return n

    with Prefetcher(range(100), make, depth=2) as ready:
        assert next(iter(ready)) == 0
        waiting.wait(5)
    # One was taken, two are in the queue, and one more was made but has no place in the queue yet.
    assert len(steps_made) <= 4


def test_an_error_is_raised_where_its_batch_would_have_been() -> None:
    def make(n: int) -> int:
        if n == 2:
            raise OSError("disk on fire")
        return n

    received = []
    with Prefetcher(range(5), make) as ready, pytest.raises(OSError, match="disk on fire"):
        for batch in ready:
            received.append(batch)
    assert received == [0, 1] and not prefetch_threads()


def test_steps_with_collectives_go_on_while_the_disk_is_slow(mesh8: Mesh) -> None:
    """The thread reads ahead, and steps on the batches that are there run to their end while it waits."""
    sharding = NamedSharding(mesh8, PartitionSpec("data"))
    step = jax.jit(lambda x: x.sum())  # an all-reduce
    reading, disk = threading.Event(), threading.Event()

    def make(n: int) -> jax.Array:
        if n == 2:
            reading.set()
            assert disk.wait(60)
        shape = jax.ShapeDtypeStruct((16, 4), "float32")
        return place_batch(lambda rows: {"x": np.full((len(rows), 4), n)}, {"x": shape}, {"x": sharding})["x"]

    with Prefetcher(range(5), make, depth=2) as ready:
        batches = iter(ready)
        assert reading.wait(60)  # ahead of the first use
        assert [float(step(next(batches))) for _ in range(2)] == [0, 64]  # while the disk does not answer
        disk.set()
        assert [float(step(batch)) for batch in batches] == [128, 192, 256]


def test_a_disk_that_does_not_answer_does_not_keep_a_run_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoshard.train.data.prefetch.PATIENCE_S", 0.01)
    disk = threading.Event()
    ready = Prefetcher(range(2), lambda n: disk.wait(60))
    with pytest.warns(AutoshardWarning, match="did not end within 0 s, because reading a batch takes longer"):
        ready.close()
    disk.set()
    ready._thread.join(60)
    assert not prefetch_threads()


def test_the_end_and_an_error_are_met_again() -> None:
    with Prefetcher(range(1), lambda n: 1 // n) as ready:
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                next(iter(ready))
    with Prefetcher(range(2), lambda n: n) as ready:
        assert list(ready) == [0, 1] and list(ready) == []


@pytest.mark.parametrize(
    "spec", [PartitionSpec(), PartitionSpec("data"), PartitionSpec(("data", "model")), PartitionSpec("data", "model")]
)
def test_a_batch_is_a_copy_of_its_rows(mesh8: Mesh, spec: PartitionSpec) -> None:
    """On CPU `device_put` can alias an aligned NumPy buffer, which the next batch may overwrite."""
    buffer = np.zeros(8 * 64 + 16, np.int32)
    start = (-buffer.ctypes.data % 64) // 4
    rows = buffer[start : start + 8 * 64].reshape(8, 64)
    rows[:] = np.arange(8 * 64).reshape(8, 64)
    original = rows.copy()
    shapes = {"x": jax.ShapeDtypeStruct((8, 64), np.int32)}
    placed = place_batch(lambda r: {"x": rows[r.start : r.stop]}, shapes, {"x": NamedSharding(mesh8, spec)})
    rows[:] = -1
    np.testing.assert_array_equal(placed["x"], original)
    assert placed["x"].sharding == NamedSharding(mesh8, spec)


def test_only_rows_of_local_devices_are_made(mesh_of: Callable[..., Mesh]) -> None:
    requested: list[range] = []

    def rows(part: range) -> dict[str, np.ndarray]:
        requested.append(part)
        return {"x": np.zeros((len(part), 4)), "y": np.zeros((len(part), 4))}

    sharding = NamedSharding(mesh_of(data=4), PartitionSpec("data"))
    shapes = dict.fromkeys("xy", jax.ShapeDtypeStruct((8, 4), np.float32))
    place_batch(rows, shapes, dict.fromkeys("xy", sharding))
    assert sorted((r.start, r.stop) for r in requested) == [(0, 2), (2, 4), (4, 6), (6, 8)]
