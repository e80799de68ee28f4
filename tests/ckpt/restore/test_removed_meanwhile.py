"""Reading while a run removes steps: a step stays while it is read, where files can be locked.

Where they cannot, readers use the steps that are left, and no step is reported as damaged.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.ckpt import Checkpointer, CheckpointError, RemovedStepError
from autoshard.ckpt.restore import step_reader
from autoshard.ckpt.store import orbax_storage, step_lock
from autoshard.cli import main

# Orbax drops the futures of a failed load's other leaves.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

READ = ("read_manifest", "read_digest_rows", "read_arrays", "_read_one", "file_bytes", "copy_tree")


def state_of(step: int) -> dict[str, Any]:
    return {"params": {"w": jnp.full((64, 64), float(step)), "host": np.full(5000, step)}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with Checkpointer(tmp_path / "run", keep=None) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state_of(step), config={"model": {"step": step}}, block=True)
    return tmp_path / "run"


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps be removed while they are read, as on a file system without locks."""
    monkeypatch.setattr(step_lock, "fcntl", None)


@pytest.fixture
def removed_at(run: Path, without_locks: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Remove steps just before a function of `orbax_storage` reads their files, and save others in their place."""

    def remove(function: str, *steps: int, saves: int | None = None) -> None:
        read = getattr(orbax_storage, function)
        remaining = set(steps)

        def removing(path: Any, *args: Any, **kwargs: Any) -> Any:
            step = int(path.name[-8:]) if path.name.startswith("step_") else 0
            if step in remaining:
                remaining.remove(step)
                with Checkpointer(run, keep=None) as writer:
                    if saves is not None:
                        writer.save(saves, state_of(saves), config={"model": {"step": saves}}, block=True)
                    writer._directory.remove(step)
            return read(path, *args, **kwargs)

        monkeypatch.setattr(orbax_storage, function, removing)

    return remove


@pytest.mark.few(1)
@pytest.mark.parametrize("function", ["read_manifest", "read_digest_rows", "read_arrays"])
def test_a_restore_uses_the_newest_remaining_step(
    run: Path, removed_at: Callable[..., None], assert_same: Any, function: str
) -> None:
    removed_at(function, 3, saves=7)
    with Checkpointer(run) as checkpoints:
        assert_same(checkpoints.restore(like=state_of(0)), state_of(7))
        assert checkpoints.restored is not None
        assert checkpoints.restored.step == 7 and checkpoints.restored.damaged == ()


@pytest.mark.few(2)
@pytest.mark.parametrize("function", READ)
def test_readers_use_the_newest_remaining_step(run: Path, removed_at: Callable[..., None], function: str) -> None:
    other = run.parent / "other"
    readers: dict[str, Callable[[Checkpointer], Any]] = {
        "read_manifest": lambda checkpoints: checkpoints.config()["model"]["step"],
        "read_digest_rows": lambda checkpoints: checkpoints.model().where[5],
        "read_arrays": lambda checkpoints: checkpoints.restore()["params"]["w"][0, 0],
        "_read_one": lambda checkpoints: len(checkpoints.verify()) + 2,
        "file_bytes": lambda checkpoints: checkpoints.describe().step,
        "copy_tree": lambda checkpoints: checkpoints.copy(None, other) or Checkpointer(other).steps()[0],
    }
    removed_at(function, 3)
    assert int(readers[function](Checkpointer(run))) == 2


def test_a_given_step_that_was_removed(run: Path, removed_at: Callable[..., None]) -> None:
    for step, function in enumerate(("read_arrays", "file_bytes", "_read_one"), 1):
        removed_at(function, step)
        checkpoints = Checkpointer(run)
        readers = checkpoints.restore, checkpoints.describe, checkpoints.verify
        with pytest.raises(RemovedStepError, match=f"step {step} in .* was removed while it was read") as caught:
            readers[step - 1](step)
        assert caught.value.step == step and "damaged" not in str(caught.value)


def test_reading_a_tensor_of_a_removed_step(run: Path, without_locks: None) -> None:
    with Checkpointer(run, keep=None) as checkpoints:
        model = checkpoints.model(3)
        checkpoints._directory.remove(3)
        with pytest.raises(RemovedStepError):
            model.tensors[0].read()


def test_a_fallback_skips_removed_steps(run: Path, removed_at: Callable[..., None], assert_same: Any) -> None:
    for file in (run / "step_00000003" / "state").rglob("*"):
        if file.is_file() and file.parent.name == "d":
            file.write_bytes(bytes(file.stat().st_size))
    removed_at("read_manifest", 2)
    with Checkpointer(run) as checkpoints, pytest.warns(match="Step 1 is restored instead"):
        assert_same(checkpoints.restore(like=state_of(0)), state_of(1))
        assert checkpoints.restored is not None and checkpoints.restored.damaged == (3,)


def test_a_reader_gives_up_on_a_writer_that_is_too_fast(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orbax_storage, "read_manifest", lambda path: (_ for _ in ()).throw(FileNotFoundError(path)))
    with monkeypatch.context() as patched:
        patched.setattr("autoshard.ckpt.restore.restore.is_committed", lambda path: False)
        patched.setattr(step_reader, "READ_PATIENCE_S", 0.0)
        with pytest.raises(RemovedStepError, match="was removed while it was read"):
            Checkpointer(run).restore()
    with pytest.raises(CheckpointError, match="damaged"):
        Checkpointer(run).config()


@pytest.mark.few(2)
@pytest.mark.parametrize("function", ["read_manifest", "file_bytes", "_read_one", "copy_tree"])
def test_the_command_omits_removed_steps(
    run: Path, removed_at: Callable[..., None], capsys: pytest.CaptureFixture, function: str
) -> None:
    removed_at(function, 1)
    action = {"_read_one": ["verify"], "copy_tree": ["copy", "--all"]}.get(function, ["ls", "--json"])
    target = [str(run.parent / "other")] if action[0] == "copy" else []
    assert main(["ckpt", action[0], str(run), *target, *action[1:]]) == 0
    printed = capsys.readouterr().out
    if action[0] == "ls":
        assert [one["step"] for one in json.loads(printed)] == [2, 3]
    else:
        lines = printed.splitlines()
        assert len(lines) == 3 and lines[0].startswith("step 1 ") and lines[0].endswith("removed meanwhile")
        assert not [line for line in lines[1:] if "removed meanwhile" in line] and "damaged" not in printed


def test_the_command_reports_a_given_step_that_was_removed(
    run: Path, removed_at: Callable[..., None], capsys: pytest.CaptureFixture
) -> None:
    removed_at("file_bytes", 2)
    assert main(["ckpt", "describe", f"{run}@2"]) == 2
    assert "step 2 in" in (error := capsys.readouterr().err) and "was removed while it was read" in error
