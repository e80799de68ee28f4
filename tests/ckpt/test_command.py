"""`autoshard ckpt` on invalid input: one clear error, exit code 2, and nothing on disk changes."""

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from autoshard.ckpt import Checkpointer, CheckpointWarning
from autoshard.ckpt.store.manifest import FORMAT, _checksum
from autoshard.cli import main

Refused = Callable[[Sequence[str], str], None]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with Checkpointer(tmp_path / "run") as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"params": {"w": jnp.ones((4, 8))}}, config={"model": {"name": "mine"}}, block=True)
    return tmp_path / "run"


@pytest.fixture
def refused(tmp_path: Path, files_of: Callable[[Path], Any], capsys: pytest.CaptureFixture) -> Refused:
    """Run a command that must fail and not change any file."""

    def check(arguments: Sequence[str], message: str) -> None:
        before = files_of(tmp_path)
        capsys.readouterr()
        assert main(["ckpt", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("autoshard ckpt: error: ") and message in error and error.count("error:") == 1, error
        assert files_of(tmp_path) == before

    return check


READING = (["ls"], ["ls", "--json"], ["describe"], ["verify"], ["export"], ["copy"], ["merge"])


def command_on(action: Sequence[str], folder: Path) -> list[str]:
    name, *options = action
    adapter = [str(folder.parent / "adapter")] if name == "merge" else []
    out = [str(folder.parent / "out")] if name in ("export", "copy", "merge") else []
    return [name, str(folder), *adapter, *out, *options]


def write_adapter(folder: Path, rows: int) -> None:
    """Write an adapter for a weight `w` of `rows` rows and 4 columns."""
    folder.mkdir()
    pair = {"A": np.ones((2, 4), np.float32), "B": np.ones((rows, 2), np.float32)}
    save_file({f"base_model.model.w.lora_{side}.weight": m for side, m in pair.items()}, folder / WEIGHTS)
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "fan_in_fan_out": True}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


WEIGHTS = "adapter_model.safetensors"


@pytest.mark.few(2)
@pytest.mark.parametrize("action", [*READING, ["prune", "--last", "1"]], ids=" ".join)
def test_a_newer_version(saved: Path, refused: Refused, action: Sequence[str]) -> None:
    """A newer format of the directory, and of a step in it."""
    write_adapter(saved.parent / "adapter", 8)
    file = saved / "step_00000002" / "_CHECKPOINT_METADATA"
    whole = json.loads(file.read_text())
    body = whole["custom_metadata"]["autoshard"] | {"format": 99}
    file.write_text(json.dumps(whole | {"custom_metadata": {"autoshard": body, "sha256": _checksum(body)}}))
    refused(command_on(action, saved), f"has format 99, this version of autoshard reads up to {FORMAT}: upgrade")
    (saved / "autoshard.json").write_text(json.dumps({"format": "autoshard checkpoints", "version": 99}))
    refused(command_on(action, saved), "was written by a newer version of autoshard (format 99): upgrade")


@pytest.mark.parametrize("action", READING, ids=" ".join)
def test_a_folder_of_another_program(tmp_path: Path, refused: Refused, action: Sequence[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    write_adapter(tmp_path / "adapter", 8)
    message = "is not a checkpoint directory of autoshard: it contains thesis.tex and no autoshard.json. Use"
    refused(command_on(action, tmp_path / "mine"), message)
    refused(command_on(action, tmp_path / "nowhere"), "does not exist: give the folder of a run")


def test_a_folder_to_which_a_run_is_writing(saved: Path, refused: Refused) -> None:
    with Checkpointer(saved) as running, Checkpointer(saved.parent / "other") as other:
        other.save(9, {"w": jnp.ones(2)}, block=True)
        running.claim()
        refused(["prune", str(saved), "--last", "1"], "another run is writing checkpoints to")
        refused(["copy", str(saved.parent / "other"), str(saved)], "another run is writing checkpoints to")
        assert main(["ckpt", "verify", str(saved)]) == 0
        assert running.steps() == [1, 2]


def test_a_copy_of_all_steps_to_a_folder_with_one_of_them(saved: Path, refused: Refused) -> None:
    other = saved.parent / "other"
    assert main(["ckpt", "copy", f"{saved}@2", str(other)]) == 0
    refused(["copy", str(saved), str(other), "--all"], "has step 2 already, and a committed step is never overwritten")
    assert main(["ckpt", "copy", f"{saved}@1", str(other)]) == 0
    refused(["copy", str(saved), str(other), "--all"], "has steps 1, 2 already")


def test_folders_without_a_name(saved: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    (saved.parent / "empty").mkdir()
    monkeypatch.chdir(saved.parent / "empty")
    for folder in (".", "/"):
        refused(["export", str(saved), folder], "exists already: use a new folder")


def test_a_step_number_of_other_digits(saved: Path, refused: Refused) -> None:
    refused(["ls", f"{saved}@\N{SUPERSCRIPT TWO}"], "does not exist: give the folder of a run")


def test_metrics_that_are_not_finite_in_json(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(2)}, metrics={"a": float("nan"), "b": -float("inf"), "c": 1.5}, block=True)

    def unknown(name: str) -> None:
        raise AssertionError(name)

    for action in ("ls", "describe"):
        assert main(["ckpt", action, str(tmp_path / "run"), "--json"]) == 0
        printed = json.loads(capsys.readouterr().out, parse_constant=unknown)
        assert (printed[0] if action == "ls" else printed)["metrics"] == {"a": "nan", "b": "-inf", "c": 1.5}


def test_an_adapter_for_another_base(saved: Path, refused: Refused) -> None:
    write_adapter(saved.parent / "adapter", 6)
    refused(command_on(["merge"], saved), "is for another base than step 2 in")


def test_a_missing_step(saved: Path, refused: Refused) -> None:
    refused(["describe", f"{saved}@7"], "there is no step 7 in")
    refused(["ls", f"{saved}@7"], "there is no step 7 in")
    refused(["export", f"{saved}@7", str(saved.parent / "out")], "there is no step 7 in")


def test_pruning_by_a_metric_that_no_step_has(saved: Path, refused: Refused) -> None:
    options = ["--last", "1", "--best", "1", "--metric", "valloss"]
    refused(["prune", str(saved), *options], "no step has the metric 'valloss'; they have: ")


def test_pruning_with_a_damaged_newest_step(saved: Path, refused: Refused, capsys: pytest.CaptureFixture) -> None:
    """The newest intact step stays, with a warning; if no step is intact, nothing is removed."""
    manifest = saved / "step_00000002" / "_CHECKPOINT_METADATA"
    manifest.write_text("{")
    for dry in (["--dry-run"], []):
        with warnings.catch_warnings():
            warnings.simplefilter("always", CheckpointWarning)
            assert main(["ckpt", "prune", str(saved), "--last", "1", *dry]) == 0
        printed = capsys.readouterr()
        assert "none; " in printed.out and printed.out.endswith(": 1, 2\n")
        assert "are damaged. The newest intact step, 1, stays" in printed.err and "steps 2 in" in printed.err
    with Checkpointer(saved, keep=None) as checkpoints:
        assert checkpoints.steps() == [1, 2]
    (saved / "step_00000001" / "_CHECKPOINT_METADATA").write_text("{")
    refused(["prune", str(saved), "--last", "1"], "is intact: nothing is removed")
