"""Readers beside a run that saves all the time and keeps two steps: each gets the newest step, silently."""

import itertools
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.ckpt import Checkpointer, CheckpointWarning, RemovedStepError, RetentionPolicy
from autoshard.ckpt.store import orbax_storage, step_lock

READS = 30
WAIT_S = 30.0  # chosen: a save takes milliseconds


def state_of(step: int) -> dict[str, Any]:
    return {f"w{i}": jnp.full((8, 8), float(step)) for i in range(4)}


class Run:
    """Saves steps in a thread until it is stopped, and keeps two of them."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.error, self.done = directory, None, threading.Event()
        self.saved = -1
        self.thread = threading.Thread(target=self._save_all_the_time)

    def _save_all_the_time(self) -> None:
        try:
            with Checkpointer(self.directory, keep=2) as checkpoints:
                for step in itertools.count():
                    if self.done.is_set():
                        return
                    checkpoints.save(step, state_of(step), block=True)
                    self.saved = step
        except BaseException as error:
            self.error = error

    def wait_for(self, step: int) -> None:
        end = time.monotonic() + WAIT_S
        while self.saved < step:
            assert self.error is None and time.monotonic() < end, self.error
            time.sleep(0.001)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "run")
    run.thread.start()
    run.wait_for(1)
    yield run
    run.done.set()
    run.thread.join()
    assert run.error is None


@pytest.fixture
def slow_every(run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[str]]:
    """Let every n-th read of arrays last until the run has saved three more steps, enough to remove this one.

    Returns the list of the steps that are read.
    """

    def slow(every: int) -> list[str]:
        read, steps = orbax_storage.read_arrays, []

        def slowly(path: Any, *args: Any, **kwargs: Any) -> Any:
            steps.append(path.name)
            if len(steps) % every == 0:
                run.wait_for(run.saved + 3)
            return read(path, *args, **kwargs)

        monkeypatch.setattr(orbax_storage, "read_arrays", slowly)
        return steps

    return slow


@pytest.mark.slow
def test_readers_get_the_newest_step(
    run: Run, slow_every: Callable[[int], list[str]], capfd: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    steps = slow_every(15)
    reader, like = Checkpointer(run.directory), state_of(0)
    for _ in range(READS):
        newest = run.saved
        restored = reader.restore(like=like)
        assert reader.restored is not None and reader.restored.step >= newest
        np.testing.assert_array_equal(restored["w3"], np.full((8, 8), float(reader.restored.step)))
    assert len(steps) == READS  # no read had to be repeated
    assert capfd.readouterr() == ("", "") and not caplog.records


@pytest.mark.slow
def test_the_next_save_removes_a_step_that_was_read(run: Run, tmp_path: Path) -> None:
    reader = Checkpointer(run.directory)
    model = reader.model()
    step = int(model.where.split()[1])
    run.wait_for(step + 4)
    assert step in reader.steps()
    assert model.tensors[0].read()[0, 0] == step
    del model
    run.wait_for(run.saved + 2)
    assert step not in reader.steps()
    assert reader.export(None, tmp_path / "exported").tensors == 4


@pytest.mark.slow
def test_readers_without_locks_try_again(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(step_lock, "fcntl", None)
    read, tries = orbax_storage.read_arrays, itertools.count(1)

    def slowly(path: Any, *args: Any, **kwargs: Any) -> Any:
        if next(tries) % 5:
            run.wait_for(run.saved + 3)
        return read(path, *args, **kwargs)

    monkeypatch.setattr(orbax_storage, "read_arrays", slowly)
    restored = Checkpointer(run.directory).restore(like=state_of(0))
    assert next(tries) > 5 and restored["w0"][0, 0] >= 0
    assert capfd.readouterr() == ("", "") and not caplog.records


def test_prune_leaves_a_step_that_is_being_read(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=None) as checkpoints:
        for step in range(4):
            checkpoints.save(step, state_of(step), block=True)
        model = Checkpointer(tmp_path).model(1)
        with pytest.warns(CheckpointWarning, match=r"steps 1 in .* are being read and stay: prune again later"):
            assert checkpoints.prune(RetentionPolicy(last=2)) == [0]
        del model
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert checkpoints.prune(RetentionPolicy(last=2)) == [1]


def test_a_step_that_is_removed_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(tmp_path, keep=None) as checkpoints:
        for step in range(3):
            checkpoints.save(step, state_of(step), block=True)
        steps = checkpoints._reader._directory.steps

        def outdated() -> list[int]:
            found = steps()
            if found[-1] > 0:
                checkpoints._directory.remove(found[-1])
            return found

        monkeypatch.setattr(checkpoints._reader._directory, "steps", outdated)
        with pytest.raises(RemovedStepError, match="step 2 in"):
            checkpoints.restore(2)
        assert checkpoints.restore()["w0"][0, 0] == 0
