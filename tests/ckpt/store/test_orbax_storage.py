"""How a step is read and written: processes read alone, a failed pack is one read, logs of failed reads are dropped."""

import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from autoshard.ckpt import Checkpointer
from autoshard.ckpt.store import orbax_storage
from autoshard.ckpt.store.orbax_storage import LeafReader, read_arrays, read_digest_rows, read_manifest, root_cause


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect the contexts that Orbax gets, and read nothing."""
    made: list[Any] = []
    make = ocp.Context

    def context() -> Any:
        made.append(make())
        return made[-1]

    monkeypatch.setattr(ocp, "Context", context)
    monkeypatch.setattr(ocp, "load_checkpointables", lambda path, wanted: {"state": {"w": "read"}})
    return made


def test_each_process_reads_by_itself(contexts: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(jax, "process_index", lambda: 2)
    assert read_arrays(Path("step"), {("w",): np.ndarray}) == {("w",): "read"}
    options = contexts[0].multiprocessing_options
    assert (options.primary_host, options.active_processes) == (2, {2})
    assert options.barrier_sync_key_prefix == "autoshard_process_2"


def test_a_single_process_keeps_the_defaults_of_orbax(contexts: list[Any]) -> None:
    default = ocp.Context().multiprocessing_options
    read_arrays(Path("step"), {("w",): np.ndarray})
    assert contexts[-1].multiprocessing_options == default


def test_nothing_is_read_if_nothing_is_wanted(contexts: list[Any]) -> None:
    assert read_arrays(Path("step"), {}) == {} and contexts == []


def test_a_state_without_arrays_has_no_digests(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, {"empty": np.zeros((0, 3), np.float32)}, block=True)
        assert checkpoints.restore(0)["empty"].shape == (0, 3)
    path = tmp_path / "step_00000000"
    assert read_digest_rows(path, read_manifest(path)) == {}


def test_a_pack_that_cannot_be_read_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"b{number:03d}": np.full(3, number, np.float32) for number in range(70)}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, state, block=True)
    path, reads = tmp_path / "step_00000000", []
    manifest = read_manifest(path)
    keys = sorted(manifest.places)

    def fail(*_: Any) -> Any:
        reads.append(1)
        raise OSError("the disk fails")

    monkeypatch.setattr(orbax_storage, "_read_one", fail)
    reader = LeafReader(path, manifest)
    for key in keys[:2]:
        with pytest.raises(OSError, match="the disk fails"):
            reader.read(key)
    assert len(keys) == 70 and len(reads) == 1


def test_the_log_of_a_read_comes_after_it_succeeds_and_not_if_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("absl")
    with orbax_storage._deferred_log():
        logger.warning("a strange layout")
        assert not caplog.records
    assert [record.getMessage() for record in caplog.records] == ["a strange layout"]
    caplog.clear()
    with pytest.raises(OSError), orbax_storage._deferred_log():
        logger.warning("a strange layout")
        raise OSError
    with orbax_storage._deferred_log(drop=True):
        logger.warning("a strange layout")
    assert not caplog.records


def test_the_cause_of_an_error_names_the_file_of_the_step() -> None:
    inner = ValueError("Error reading /run/step_1/state/w/c/0.bin: corrupt")
    outer = OSError("a read failed")
    outer.__cause__ = inner
    assert root_cause(outer, "/run/step_1") == ("state/w/c/0.bin", str(inner))
    assert root_cause(OSError("no\n space"), "/run/step_1") == (None, "no space")
    empty = ValueError()
    outer.__cause__ = empty
    assert root_cause(outer, "/run/step_1") == (None, "a read failed")
    inner.__context__ = inner  # a loop ends
    assert root_cause(inner, "/run/step_1")[0] == "state/w/c/0.bin"
