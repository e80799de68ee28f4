"""The lock of a directory's writer where files cannot be locked, and names that only look like steps."""

import os
from pathlib import Path
from typing import Any

import pytest

from autoshard.ckpt.store import directory
from autoshard.ckpt.store.directory import StepDirectory, is_committed
from autoshard.errors import CheckpointError


def test_a_second_writer_is_refused_until_the_first_releases(tmp_path: Path) -> None:
    one, other = StepDirectory(tmp_path), StepDirectory(tmp_path)
    one.claim()
    with pytest.raises(CheckpointError, match=f"another run is writing checkpoints to {tmp_path}"):
        other.claim()
    one.release()
    other.claim()
    other.release()


@pytest.mark.parametrize("without", ["fcntl", "flock", "open"])
def test_without_locks_several_writers_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    def unsupported(*_: object) -> Any:
        raise OSError("not supported")

    if without == "fcntl":
        monkeypatch.setattr(directory, "fcntl", None)
    else:
        monkeypatch.setattr(*((directory.fcntl, "flock") if without == "flock" else (os, "open")), unsupported)
    opened = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else None
    writers = [StepDirectory(tmp_path), StepDirectory(tmp_path)]
    for writer in writers:
        writer.claim()
        writer.claim()  # again: changes nothing
    if opened is not None:
        assert len(os.listdir("/proc/self/fd")) == opened, "a file that cannot be locked stays open"
    for writer in writers:
        writer.release()
    assert (tmp_path / "autoshard.json").exists()


def test_a_name_with_too_many_zeros_is_not_a_step(tmp_path: Path) -> None:
    steps = StepDirectory(tmp_path)
    assert steps.steps() == []
    steps.claim()
    steps.release()
    for name in ("step_00000003", "step_000000004", "step_123456789", "step_7"):
        (tmp_path / name).mkdir()
    assert steps.steps() == [3, 123456789]


def test_a_damaged_step_is_set_aside_under_a_free_name(tmp_path: Path) -> None:
    steps = StepDirectory(tmp_path)
    steps.claim()
    names = []
    for _ in range(3):
        steps.step_path(3).mkdir()
        names.append(steps.set_aside(3))
    assert names == ["damaged.step_00000003", "damaged.step_00000003.1", "damaged.step_00000003.2"]
    with pytest.raises(CheckpointError, match="damaged step 3 of .* cannot be renamed"):
        steps.set_aside(3)
    steps.release()


def test_a_step_that_cannot_be_removed_is_named(tmp_path: Path) -> None:
    steps = StepDirectory(tmp_path)
    steps.claim()
    with pytest.raises(CheckpointError, match=f"step 5 cannot be removed from {tmp_path}"):
        steps.remove(5)
    steps.release()


class Bucket:
    """A path of an object store, where a file says that a step is complete."""

    def __init__(self, files: set[str]) -> None:
        self.files, self.name = files, ""

    def __truediv__(self, name: str) -> "Bucket":
        child = Bucket(self.files)
        child.name = name
        return child

    def __str__(self) -> str:
        return "gs://bucket/run/step_00000001"

    def exists(self) -> bool:
        return self.name in self.files


def test_in_an_object_store_a_file_says_that_a_step_is_complete() -> None:
    complete: Any = Bucket({"", "commit_success.txt"})
    unfinished: Any = Bucket({""})
    assert is_committed(complete) and not is_committed(unfinished)
