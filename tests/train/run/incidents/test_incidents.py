"""Runs with bad steps: stopped, skipped, rolled back; the same when they are resumed."""

import dataclasses
import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from autoshard.errors import AutoshardError
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.inference.trained_model import load_trained
from autoshard.train.run.loop import Trainer
from autoshard.train.run.metrics import read_metrics
from autoshard.train.step.guard import GuardConfig

MakeConfig = Callable[..., TrainConfig]
CONSTANT = dict(learning_rate=1e-2, warmup_steps=0, schedule="constant")


class Changed:
    """A source of data whose batches are others."""

    def __init__(self, source: Any, bad: Mapping[int, Callable], order: Callable[[int], int] = lambda step: step):
        self._source, self._bad, self._order = source, bad, order

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def batch(self, step: int, rows: slice) -> dict[str, np.ndarray]:
        """Return the batch, changed if it is a bad one."""
        index = self._order(step)
        return self._bad.get(index, lambda batch: batch)(self._source.batch(index, rows))


def no_number(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Make the loss NaN."""
    return {**batch, "mask": batch["mask"] * np.float32(np.nan)}


def other_text(batch: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Replace the tokens by some that the text never has, so that the loss is a spike."""
    return {**batch, "inputs": batch["inputs"] * 0 + 200, "targets": batch["targets"] * 0 + 201}


def run(config: TrainConfig, bad: Mapping[int, Callable] | None = None, order: Any = lambda step: step) -> Any:
    trainer = Trainer(config)
    trainer.source = Changed(trainer.source, bad or {}, order)  # pyright: ignore[reportAttributeAccessIssue]
    trainer.run()
    return load_trained(trainer.run_dir).state


def lines(config: TrainConfig) -> list[dict[str, Any]]:
    assert config.run_dir is not None
    return read_metrics(config.run_dir / "metrics.jsonl")


def incidents(config: TrainConfig) -> list[dict[str, Any]]:
    return [line for line in lines(config) if "incident" in line]


def check_same(one: Any, other: Any, *parts: str) -> None:
    for part in parts:
        jax.tree.map(np.testing.assert_array_equal, getattr(one, part), getattr(other, part))


def test_a_run_stops_and_names_the_first_leaf(make_config: MakeConfig) -> None:
    config = make_config(steps=6, log_every=100, optimizer=CONSTANT)
    with pytest.raises(AutoshardError) as caught:
        run(config, {2: no_number})
    message = str(caught.value)
    assert f"step 3: the loss is nan: the gradient of {incidents(config)[0]['leaf']} is the first" in message
    assert "all parameters are finite" in message and "the batch has non-finite values in mask" in message
    (found,) = incidents(config)
    assert found["incident"] == "stop" and found["step"] == 3 and found["batch"] == 2 and found["leaf"]
    assert found["leaf"] in message and "--guard.non-finite skip or rollback" in message


AVERAGED = dict(optimizer=CONSTANT, ema_decay=0.5, ema_every=3)
_without: list[Any] = []  # the result of the first test that needs this run


@pytest.fixture
def without(make_config: MakeConfig, tmp_path: Path) -> Any:
    """The state of a run without batches 2 and 3."""
    if not _without:
        config = make_config(steps=6, run_dir=tmp_path / "without", guard=GuardConfig("skip"), **AVERAGED)
        _without.append(run(config, order=lambda step: step + 2 * (step >= 2)))
    return _without[0]


def test_a_skipped_step_is_as_if_its_batch_were_not_there(make_config: MakeConfig, without: Any) -> None:
    skipping = make_config(steps=8, checkpoint_every=4, guard=GuardConfig("skip"), **AVERAGED)
    skipped = run(skipping, {2: no_number, 3: no_number})
    check_same(skipped, without, "params", "opt_state", "ema", "variables")
    assert int(skipped.step) == 8 and int(skipped.guard["skipped_steps"]) == 2
    found = incidents(skipping)
    assert [(each["incident"], each["step"], "nan" in each["why"]) for each in found] == [
        *(("skip", 3, True), ("skip", 4, True))
    ]
    counts = [line.get("skipped_steps") for line in lines(skipping) if "learning_rate" in line]
    assert counts == [0, 0, 1, 2, 2, 2, 2, 2]


def test_a_rollback_leaves_out_the_batches_up_to_the_bad_one(make_config: MakeConfig, without: Any) -> None:
    rolling = make_config(steps=6, guard=GuardConfig("rollback"), checkpoint_every=2, **AVERAGED)
    rolled = run(rolling, {3: no_number})
    check_same(rolled, without, "step", "params", "opt_state")
    (found,) = incidents(rolling)
    assert found["incident"] == "rollback" and found["step"] == 4
    assert [line["step"] for line in lines(rolling) if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert rolling.run_dir is not None
    assert json.loads((rolling.run_dir / "rollbacks.jsonl").read_text()) == dict(bad_step=4, step=2, first=2, last=3)


@pytest.mark.slow
@pytest.mark.parametrize("reaction", ["skip", "rollback"])
def test_a_resumed_run_is_the_same_run(make_config: MakeConfig, tmp_path: Path, reaction: Any) -> None:
    shape = dict(optimizer=CONSTANT, checkpoint_every=2, guard=GuardConfig(reaction), ema_decay=0.5)
    whole = run(make_config(steps=8, run_dir=tmp_path / "whole", **shape), {3: no_number})
    parts = make_config(steps=5, run_dir=tmp_path / "parts", **shape)
    run(parts, {3: no_number})
    resumed = run(dataclasses.replace(parts, steps=8, resume=True), {3: no_number})
    check_same(whole, resumed, "step", "params", "opt_state", "ema")
    assert len(incidents(parts)) == 1


@pytest.mark.slow
def test_a_spike_is_skipped_and_the_options_may_change_when_a_run_is_resumed(make_config: MakeConfig) -> None:
    first = make_config(steps=30, optimizer=dict(CONSTANT, learning_rate=3e-2))
    run(first)
    guard = GuardConfig(spikes="skip", spike_factor=1.5, spike_window=4)
    second = dataclasses.replace(first, steps=40, resume=True, guard=guard)
    state = run(second, {36: other_text})
    assert [(line["incident"], line["step"]) for line in incidents(second)] == [("skip", 37)]
    assert int(state.guard["skipped_steps"]) == 1 and int(state.guard["seen"]) == 9
    norms = dataclasses.replace(second, steps=42, guard=dataclasses.replace(guard, spike_of="grad_norm"))
    state = run(norms)
    assert int(state.guard["skipped_steps"]) == 1 and int(state.guard["seen"]) == 2  # no loss is among the norms
    third = dataclasses.replace(second, steps=44, guard=GuardConfig())
    assert run(third).guard is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        dict(plan="dp:2 tp:4"),
        dict(plan="fsdp:8", microbatches=2, batch_size=16, gpt=dict(loss_chunks=2)),
        dict(plan="pp:2 dp:4", microbatches=4, batch_size=16, gpt=dict(layers=2), schedule="1f1b"),
    ],
    ids=["tp", "microbatches", "pipeline"],
)
def test_every_plan_skips(make_config: MakeConfig, tmp_path: Path, settings: dict[str, Any]) -> None:
    shape = dict(optimizer=CONSTANT) | settings
    skipping = make_config(steps=4, guard=GuardConfig("skip"), **shape)
    skipped = run(skipping, {1: no_number})
    without = run(make_config(steps=3, run_dir=tmp_path / "without", **shape), order=lambda step: step + (step >= 1))
    for one, other in zip(jax.tree.leaves(skipped.params), jax.tree.leaves(without.params), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    (found,) = incidents(skipping)
    assert found["leaf"]


@pytest.mark.slow
def test_limits_end_a_run(make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    bad = dict.fromkeys(range(2, 20), no_number)
    skipping = make_config(steps=9, optimizer=CONSTANT, guard=GuardConfig("skip", max_skips=2))
    with pytest.raises(AutoshardError, match=r"step 5: .* it is bad step 3 in a row, and --guard.max-skips is 2"):
        run(skipping, bad)
    assert [line["incident"] for line in incidents(skipping)] == ["skip", "skip", "stop"]
    rolling = make_config(
        steps=9, run_dir=tmp_path / "rolling", optimizer=CONSTANT, guard=GuardConfig("rollback", max_rollbacks=2)
    )
    with pytest.raises(AutoshardError, match=r"the run was rolled back 2 times, which is --guard.max-rollbacks"):
        run(rolling, bad)
    assert [line["incident"] for line in incidents(rolling)] == ["rollback", "rollback", "stop"]
    assert capsys.readouterr().out.count("a rollback goes back to step 0, because no step is saved before the end") == 1


@pytest.mark.slow
def test_a_signal_during_a_rollback_saves_and_the_resumed_run_is_the_same(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = dict(steps=8, optimizer=CONSTANT, checkpoint_every=2, guard=GuardConfig("rollback"))
    whole = run(make_config(run_dir=tmp_path / "whole", **shape), {3: no_number})
    restored, parts = Trainer._restored, make_config(run_dir=tmp_path / "parts", **shape)

    def signalled(trainer: Trainer, checkpoints: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return restored(trainer, checkpoints)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_restored", signalled)
        assert int(run(parts, {3: no_number}).step) == 3  # one step after the restored one
    resumed = run(dataclasses.replace(parts, resume=True), {3: no_number})
    check_same(whole, resumed, "step", "params", "opt_state")
    assert len(incidents(parts)) == 1
    assert [line["step"] for line in lines(parts) if "learning_rate" in line] == [1, 2, 3, 4, 5, 6, 7, 8]
