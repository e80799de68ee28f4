"""Saving in the background writes the state at the time of the call."""

import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from autoshard.ckpt import Checkpointer, CheckpointError
from autoshard.ckpt.state import array_digest
from autoshard.ckpt.store import orbax_storage

LEAVES = 6
CALLS = ("save_checkpointables", "load_checkpointables", "checkpointables_metadata")


def state_at(step: int) -> dict[str, np.ndarray]:
    return {f"w{i}": np.full((256, 128), 1000 * i + step, np.float32) for i in range(LEAVES)}


@pytest.fixture
def delayed_writer(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Delay Orbax's writes until the event is set."""
    may_write, save = threading.Event(), ocp.save_checkpointables

    def delayed_save(*args: Any, **kwargs: Any) -> None:
        assert may_write.wait(60)
        save(*args, **kwargs)

    monkeypatch.setattr(ocp, "save_checkpointables", delayed_save)
    return may_write


def test_buffers_may_be_donated_at_once(tmp_path: Path, mesh8: Mesh, delayed_writer: threading.Event) -> None:
    sharding = NamedSharding(mesh8, PartitionSpec("data", "model"))
    advance = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0, out_shardings=sharding)
    state = jax.device_put(state_at(0), sharding)
    template = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, state, config={})
        for _ in range(5):  # the writer reads nothing before these have reused the buffers
            donated, state = state, advance(state)
            assert all(leaf.is_deleted() for leaf in donated.values())
        jax.block_until_ready(state)
        assert checkpoints.steps() == []
        delayed_writer.set()
        restored = checkpoints.restore(like=template)
    for name, want in state_at(0).items():
        np.testing.assert_array_equal(restored[name], want)


def test_host_arrays_may_be_overwritten_at_once(tmp_path: Path, delayed_writer: threading.Event) -> None:
    state = state_at(0)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, state, config={})
        for leaf in state.values():
            leaf[:] = -1
        delayed_writer.set()
        restored = checkpoints.restore(like=state)
    np.testing.assert_array_equal(restored["w3"], state_at(0)["w3"])


def test_saves_in_quick_succession(tmp_path: Path, mesh8: Mesh) -> None:
    sharding = NamedSharding(mesh8, PartitionSpec("model"))
    advance = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = jax.device_put(state_at(0), sharding)
    with Checkpointer(tmp_path, keep=None) as checkpoints:
        for step in range(6):
            checkpoints.save(step, state, config={})
            state = advance(state)
        for step in range(6):
            np.testing.assert_array_equal(checkpoints.restore(step, state)["w2"], state_at(step)["w2"])


def test_a_blocking_save_is_committed(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(4, {"w": jnp.ones(3)}, config={}, block=True)
        assert checkpoints.latest() == 4


def test_latest_waits_for_the_last_save(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(4, {"w": jnp.ones(3)}, config={})
        assert checkpoints.latest() == 4


def test_leaving_the_with_block_finishes_the_save(tmp_path: Path) -> None:
    with pytest.raises(KeyError), Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(4, {"w": jnp.ones(3)}, config={})
        raise KeyError
    assert Checkpointer(tmp_path).steps() == [4]


def test_an_error_in_the_background_is_raised_by_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_on_full_disk(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(3)}, config={}, block=True)
        with monkeypatch.context() as patch:
            patch.setattr(ocp, "save_checkpointables", fail_on_full_disk)
            checkpoints.save(2, {"w": jnp.ones(3)}, config={})
            with pytest.raises(CheckpointError, match=r"step 2 could not be written(?s:.*)No space.*(?s:.*): \[1\]"):
                checkpoints.wait()
        checkpoints.wait()  # raised only once
        checkpoints.save(3, {"w": jnp.ones(3)}, config={}, block=True)
        assert checkpoints.steps() == [1, 3]


def test_leftovers_of_killed_saves_are_removed_by_the_next_writer(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(3)}, config={})
    for name in (
        "step_00000002.orbax-checkpoint-tmp",
        "step_00000003.orbax-checkpoint-tmp-17",
        "removed.step_00000000",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_text("half")
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.steps() == [1]
        assert len(list(tmp_path.iterdir())) == 5, "reading removes nothing"
        checkpoints.save(2, {"w": jnp.ones(3)}, config={})
    assert sorted(path.name for path in tmp_path.iterdir())[1:] == ["step_00000001", "step_00000002"]


def test_reading_waits_for_the_save_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that starts during a save in the same process, by any Checkpointer, breaks the save in Orbax."""
    save, load, look = (getattr(ocp, name) for name in CALLS)
    saving_started, saving = threading.Event(), []

    def slow_save(*args: Any, **kwargs: Any) -> Any:
        saving.append(True)
        saving_started.set()
        time.sleep(0.3)
        try:
            return save(*args, **kwargs)
        finally:
            saving.clear()

    def not_during_save(call: Any) -> Any:
        return lambda *args, **kwargs: pytest.fail("read while writing") if saving else call(*args, **kwargs)

    state = {"w": jnp.arange(8.0)}
    with Checkpointer(tmp_path, keep=None) as checkpoints:
        checkpoints.save(1, state, block=True)
        for name, call in zip(CALLS, (slow_save, not_during_save(load), not_during_save(look)), strict=True):
            monkeypatch.setattr(ocp, name, call)
        readers = (
            lambda: checkpoints.verify(1),
            lambda: checkpoints.describe(1),
            lambda: Checkpointer(tmp_path).config(1),
            lambda: Checkpointer(tmp_path).restore(1, like=state),
        )
        for step, read in enumerate(readers, 2):
            saving_started.clear()
            checkpoints.save(step, state)
            assert saving_started.wait(60)
            read()
            checkpoints.wait()


def test_digests_are_dispatched_before_save_returns(
    tmp_path: Path, mesh8: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they would wait for the train step that follows, and the writing for them."""
    events: list[str] = []
    digest = array_digest.digests

    def digests(leaves: Any, packs: Any = (), on_dispatch: Any = bool) -> Any:
        def dispatched() -> None:
            events.append("dispatch")
            on_dispatch()

        time.sleep(0.01)  # the thread in the background gets to this late
        return digest(leaves, packs, on_dispatch=dispatched)

    monkeypatch.setattr(array_digest, "digests", digests)
    monkeypatch.setattr(orbax_storage, "MAX_HANDOVER_S", 60)
    state = jax.device_put(state_at(0), NamedSharding(mesh8, PartitionSpec("data")))
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, state)
        events.append("returned")
    assert events == ["dispatch", "returned"]


@pytest.mark.few(1)
@pytest.mark.parametrize("count", [4, 200])
def test_a_prepared_save_compiles_nothing(
    tmp_path: Path, mesh8: Mesh, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the digests of single leaves (one program or several) nor packs are compiled by the save."""
    sharding = NamedSharding(mesh8, PartitionSpec("data", "model"))
    # Shapes that no other test has, because JAX keeps the executables of a process.
    state = {f"w{i}": np.full((8 + 8 * (i % 3), 24 + count), i, np.float32) for i in range(count)}
    state = jax.device_put(state, sharding) | {"key": jax.random.key(0), "host": np.ones(3), "step": jnp.int32(3)}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.prepare(state)
        checkpoints._writer._thread.submit(bool).result()
        jax.config.update("jax_log_compiles", True)
        try:
            caplog.clear()
            checkpoints.save(0, state)
            checkpoints.wait()
        finally:
            jax.config.update("jax_log_compiles", False)
        messages = [record.getMessage() for record in caplog.records]
        assert not [text for text in messages if "Finished XLA compilation" in text]
        restored = checkpoints.restore(0, like=state)
    np.testing.assert_array_equal(restored["w3"], state["w3"])


def _wait(begin: threading.Event, end: threading.Event) -> None:
    begin.wait(60)
    end.set()


def test_preparing_does_not_delay_or_break_a_save(tmp_path: Path, mesh8: Mesh) -> None:
    state = jax.device_put(state_at(0), NamedSharding(mesh8, PartitionSpec("data")))
    with Checkpointer(tmp_path) as checkpoints:
        may_compile, compiled = threading.Event(), threading.Event()
        checkpoints._writer.prepare(lambda: _wait(may_compile, compiled))
        checkpoints.save(0, state)
        assert not compiled.is_set(), "the save waited for the compilation"
        assert checkpoints.steps() == []
        may_compile.set()
        assert checkpoints.latest() == 0
        with pytest.raises(CheckpointError, match="w: a ShapeDtypeStruct is not an array"):
            checkpoints.prepare({"w": jax.ShapeDtypeStruct((3,), np.float32)})
