"""Which steps are kept, and when a step is saved."""

import math
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard import ckpt
from autoshard.ckpt import Checkpointer, CheckpointError, CheckpointWarning, RetentionPolicy, SaveEvery
from autoshard.ckpt.restore import restore, step_reader


@given(
    st.dictionaries(st.integers(0, 60), st.one_of(st.none(), st.floats(allow_nan=True)), min_size=1),
    st.integers(1, 5),
    st.integers(0, 4),
    st.integers(0, 20),
    st.sampled_from(["min", "max"]),
)
def test_retention_policy(values: dict[int, float | None], last: int, best: int, every: int, mode: str) -> None:
    keep = RetentionPolicy(last, best=best, metric="loss", mode=mode, every=every)  # type: ignore[arg-type]
    steps = {step: {} if value is None else {"loss": value} for step, value in values.items()}
    kept = keep.of(steps)
    assert max(steps) in kept and kept <= set(steps)
    assert set(sorted(steps)[-last:]) <= kept
    assert {step for step in steps if every and step % every == 0} <= kept
    finite = {step: value for step, value in values.items() if value is not None and math.isfinite(value)}
    others = kept - set(sorted(steps)[-last:]) - {step for step in steps if every and step % every == 0}
    assert len(others) <= best and others <= set(finite)
    dropped = set(finite) - kept
    good = sorted(finite.values(), reverse=mode == "max")[:best]
    assert sum(finite[step] in good for step in kept if step in finite) >= min(best, len(finite))
    assert not [s for s in dropped if good and (finite[s] < good[-1] if mode == "min" else finite[s] > good[-1])]


@pytest.mark.parametrize(("mode", "kept"), [("min", {4, 5, 9}), ("max", {2, 3, 9})])
def test_the_best_steps(mode: Literal["min", "max"], kept: set[int]) -> None:
    """Of steps with equal values, the newest is kept."""
    values = {1: 7.0, 2: 7.0, 3: 8.0, 4: 1.0, 5: 2.0, 6: 3.0, 9: 4.0}
    assert (
        RetentionPolicy(1, best=2, metric="score", mode=mode).of({step: {"score": v} for step, v in values.items()})
        == kept
    )


def test_a_run_keeps_its_best_steps(tmp_path: Path) -> None:
    losses = {1: 3.0, 2: 1.0, 3: math.nan, 4: 2.0, 5: 2.5, 6: None}
    with Checkpointer(tmp_path, keep=RetentionPolicy(1, best=2, metric="loss")) as checkpoints:
        for step, loss in losses.items():
            metrics = {} if loss is None else {"loss": loss}
            checkpoints.save(step, {"w": jnp.ones(2)}, metrics=metrics)
        assert checkpoints.latest() == 6
        assert checkpoints.steps() == [2, 4, 6]
    # Another process reads the metrics from the files.
    with Checkpointer(tmp_path, keep=RetentionPolicy(1, best=1, metric="loss")) as checkpoints:
        checkpoints.save(7, {"w": jnp.ones(2)}, metrics={"loss": 9.0}, block=True)
        assert checkpoints.steps() == [2, 7]
        assert checkpoints.describe(2).metrics == {"loss": 1.0}


def test_metrics_that_are_not_finite(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(
            0, {"w": jnp.ones(2)}, metrics={"a": math.nan, "b": -math.inf, "c": jnp.float32(2)}, block=True
        )
        metrics = checkpoints.describe().metrics
        assert math.isnan(metrics["a"]) and metrics["b"] == -math.inf and metrics["c"] == 2.0
        with pytest.raises(CheckpointError, match="metrics must be numbers: d='good' is not"):
            checkpoints.save(1, {"w": jnp.ones(2)}, metrics={"d": "good"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(last=0), "last is 0; it must be at least 1, or None"),
        (dict(best=2), "best is 2, but no metric is given"),
        (dict(every=-1, best=-2), "best is -2; it must be at least 0; every is -1; it must be at least 0"),
        (dict(mode="least"), "mode is 'least'; it must be 'min' or 'max'"),
    ],
)
def test_invalid_settings(settings: dict, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        RetentionPolicy(**settings)


def test_when_a_save_is_due() -> None:
    seconds = [0.0]
    every = SaveEvery(steps=10, minutes=2.0, now=lambda: seconds[0])
    assert [step for step in range(1, 31) if every.due(step)] == [10, 20, 30]
    seconds[0] = 119.0
    assert not every.due(31)
    seconds[0] = 120.0
    assert every.due(32)
    every.saved()
    assert not every.due(33)
    answers: list[bool] = []
    shared = SaveEvery(
        minutes=1.0, now=lambda: seconds[0], agreed=lambda due: bool(answers.append(due)) or True, asked_every=5
    )
    assert [step for step in range(1, 11) if shared.due(step)] == [5, 10] and answers == [False, False]
    assert not SaveEvery().due(1)


def steps_of(directory: Path) -> list[int]:
    return Checkpointer(directory).steps()


def test_new_steps_with_lower_numbers_are_kept(tmp_path: Path) -> None:
    """After a run resumes from an older step, the policy also applies to its new steps alone."""
    state = {"w": np.arange(4.0)}
    with Checkpointer(tmp_path, keep=None) as checkpoints:
        for step in (10, 80, 90, 100):
            checkpoints.save(step, state, block=True)
    with Checkpointer(tmp_path, keep=2) as checkpoints:
        checkpoints.restore(10, like=state)
        for step in (11, 12, 13):
            checkpoints.save(step, state, block=True)
    assert steps_of(tmp_path) == [12, 13, 90, 100]


def damage(step: Path) -> None:
    for file in (step / "state").rglob("*"):
        if file.is_file() and file.parent.name == "d":
            file.write_bytes(bytes(file.stat().st_size))


def test_a_damaged_step_is_renamed_and_not_removed(tmp_path: Path) -> None:
    state = {"w": np.arange(4096.0)}
    with Checkpointer(tmp_path, keep=1) as checkpoints:
        checkpoints.save(10, state, block=True)
    with Checkpointer(tmp_path, keep=None) as checkpoints:
        checkpoints.save(20, state | {"w": state["w"] + 1}, block=True)
    damage(tmp_path / "step_00000020")
    with Checkpointer(tmp_path, keep=1) as checkpoints:
        with pytest.warns(CheckpointWarning, match="Step 10 is restored instead"):
            restored = checkpoints.restore(like=state)
        assert restored["w"][0] == 0 and checkpoints.latest() == 10 and steps_of(tmp_path) == [10, 20]
        with pytest.warns(CheckpointWarning, match="step 20 in .* is damaged: it was renamed to damaged.step_00000020"):
            checkpoints.save(15, state, block=True)
        assert checkpoints.steps() == [15]
        checkpoints.save(20, state | {"w": state["w"] + 2}, block=True)
        assert checkpoints.restore(like=state)["w"][0] == 2 and not checkpoints.verify()
    assert (tmp_path / "damaged.step_00000020").is_dir()


def test_pruning_keeps_the_newest_intact_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are read from the newest on until one is intact; none is read if none would be removed."""
    read: list[int] = []
    state = {"w": np.arange(4096.0)}
    with Checkpointer(tmp_path, keep=None) as checkpoints:
        for step in (10, 20, 30, 40):
            checkpoints.save(step, state, block=True)
        damage(tmp_path / "step_00000030")
        damage(tmp_path / "step_00000040")
        with pytest.warns(CheckpointWarning, match="steps 30, 40 in .* are damaged. The newest intact step, 20, stays"):
            assert checkpoints.would_prune(RetentionPolicy(1)) == [10, 30]
        with pytest.warns(CheckpointWarning, match="steps 30, 40 in .* are damaged. The newest intact step, 20, stays"):
            assert checkpoints.prune(RetentionPolicy(2)) == [10]
        assert checkpoints.steps() == [20, 30, 40]
        checkpoints.save(50, state, block=True)
        monkeypatch.setattr(
            step_reader, "damaged_leaves", lambda path, step: read.append(step) or restore.damaged_leaves(path, step)
        )
        assert checkpoints.prune(RetentionPolicy(4)) == [] and read == []
        assert checkpoints.prune(RetentionPolicy(3)) == [20] and read == [50]
        damage(tmp_path / "step_00000050")
        with pytest.raises(CheckpointError, match="no step in .* is intact: nothing is removed"):
            checkpoints.prune(RetentionPolicy(1))
        assert checkpoints.steps() == [30, 40, 50]


def test_a_run_reads_nothing_to_remove_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_reader, "damaged_leaves", lambda *_: pytest.fail("a step was read"))
    with Checkpointer(tmp_path, keep=1) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"w": jnp.ones(2)}, block=True)
        assert checkpoints.steps() == [3]


@pytest.mark.parametrize(("old", "new"), [("Keep", RetentionPolicy), ("Every", SaveEvery)])
def test_the_old_names_warn(old, new):
    with pytest.warns(DeprecationWarning, match=f"{old} is now autoshard.ckpt.{new.__name__}"):
        assert getattr(ckpt, old) is new
