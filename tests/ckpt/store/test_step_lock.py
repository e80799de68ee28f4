"""Locks of steps: a reader keeps its step, a remover keeps readers out, and without locks nothing is kept."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.ckpt.store import step_lock
from autoshard.ckpt.store.directory import StepDirectory
from autoshard.ckpt.store.step_lock import ReadLock, unread

HOLD = """
import fcntl, os, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_SH)
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def step(tmp_path: Path) -> Path:
    directory = StepDirectory(tmp_path)
    directory.claim()
    directory.release()
    path = tmp_path / "step_00000003"
    path.mkdir()
    return path


def test_a_step_is_removed_when_its_last_reader_is_done(step: Path) -> None:
    directory = StepDirectory(step.parent)
    one, other = ReadLock(step), ReadLock(step)
    assert directory.remove(3) == [] and step.exists()
    one.release()
    assert directory.remove(3) == []
    with other:
        assert directory.remove(3) == []
    assert directory.remove(3) == [3] and os.listdir(step.parent) == ["autoshard.json"]


def test_a_lock_ends_with_its_object(step: Path) -> None:
    lock = ReadLock(step)
    with unread(step) as free:
        assert not free
    del lock
    gc.collect()
    with unread(step) as free:
        assert free


def test_a_lock_ends_with_its_process(step: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(step)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None and reader.stdout.readline() == "locked\n"
        with unread(step) as free:
            assert not free
        reader.kill()
    with unread(step) as free:
        assert free


def test_a_removed_step_cannot_be_locked(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        ReadLock(step.parent / "step_00000004")
    lock = step_lock._lock

    def removing(descriptor: int, *, alone: bool, wait: bool) -> bool | None:
        if step.exists():
            step.rename(step.parent / "removed.step_00000003")  # between opening the folder and locking it
            step.mkdir()
        return lock(descriptor, alone=alone, wait=wait)

    monkeypatch.setattr(step_lock, "_lock", removing)
    with pytest.raises(FileNotFoundError, match="was removed"):
        ReadLock(step)
    with unread(step.parent / "removed.step_00000003") as free:
        assert free  # the failed lock is released


@pytest.mark.parametrize("without", ["fcntl", "flock", "open"])
def test_without_locks_nothing_is_kept(step: Path, monkeypatch: pytest.MonkeyPatch, without: str) -> None:
    def unsupported(*_: object) -> None:
        raise OSError("not supported")

    if without == "fcntl":
        monkeypatch.setattr(step_lock, "fcntl", None)
    else:
        monkeypatch.setattr(*((step_lock.fcntl, "flock") if without == "flock" else (os, "open")), unsupported)
    with ReadLock(step), unread(step) as free:
        assert free
