"""Resumed runs: with the same command line, with fewer devices, and with other settings."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.ckpt import Checkpointer
from autoshard.cli import main
from autoshard.errors import AutoshardWarning, ConfigError, PlanError
from autoshard.train.config import run_directory
from autoshard.train.config.stored_config import to_dict
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.run import resumption
from autoshard.train.run.attempts import read_attempts
from autoshard.train.run.loop import train
from autoshard.train.run.metrics import read_metrics
from autoshard.train.run.resumption import (
    check_same_run,
    place_again,
    scalings,
    stored_config,
    with_newer_request,
    with_searched_variant,
)

MakeConfig = Callable[..., TrainConfig]


def attach(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let the machine have fewer devices."""
    devices = jax.devices()[:count]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    monkeypatch.setattr(jax, "device_count", lambda *_: count)


def test_a_requested_plan_is_scaled_to_the_devices_of_the_resumed_run(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    run_dir = train(make_config(steps=0, optimizer=dict(warmup_steps=0))).run_dir  # with fsdp:8
    attach(monkeypatch, 4)
    capsys.readouterr()
    assert main(["train", "--resume", "--run-dir", str(run_dir), "--steps", "2"]) == 0
    output = capsys.readouterr().out
    line = "planned anew: the run was started with --plan fsdp:8; on 4 devices the plan is fsdp:4\n"
    assert output.count("planned anew") == 1 and line in output
    assert "on 4 cpu devices; the run continues from step 0" in output
    assert [line["step"] for line in read_metrics(run_dir / "metrics.jsonl") if "loss" in line] == [1, 2]
    assert run_directory.read_config(run_dir)["plan"] == "fsdp:8"  # for the day when the devices are back
    events = read_attempts(run_dir / "attempts.jsonl")
    assert [(each["event"], each["step"]) for each in events if each["event"] != "save"] == [
        ("begin", 0), ("end", 0), ("begin", 0), ("end", 2),
    ]  # fmt: skip


def test_the_plan_of_other_devices_is_made_anew_in_kind(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning itself is replaced: it refuses some plans, and finds that others need too much memory."""
    tried: list[Any] = []

    def place_with(refused: Sequence[str], too_large: Sequence[str]) -> Any:
        tried.clear()

        def place(config: TrainConfig, plan: Any) -> Any:
            tried.append((config.plan, config.mesh, config.target, plan))
            if config.plan in refused:
                raise PlanError(f"{config.plan} is refused")
            chosen = config.plan or "dp:2 cp:2"
            return SimpleNamespace(plan=SimpleNamespace(chosen=chosen, fits=config.plan not in too_large))

        return place

    attach(monkeypatch, 4)
    config = make_config(plan="fsdp:4 tp:2", target="cpu:8")
    placed, line = place_again(place_with([], []), config, config)
    assert placed.plan.chosen == "fsdp:2 tp:2" and tried == [("fsdp:2 tp:2", None, None, None)]
    assert line is not None and line.startswith("planned anew: the run was started with --plan 'fsdp:4 tp:2' --target")
    _, line = place_again(place_with(["fsdp:2 tp:2"], []), config, config)
    assert line is not None and line.endswith("on 4 devices the plan is fsdp:4")
    _, line = place_again(place_with(["fsdp:2 tp:2"], ["fsdp:4"]), config, config)
    assert tried[-1] == (None, None, None, None) and len(tried) == 3
    assert line is not None
    assert line.endswith("the plan is dp:2 cp:2, from a search, because no scaling of the request fits")
    # Options that are new in the resumed run are the user's own, and are not changed.
    _, line = place_again(place_with([], []), replace(config, plan="fsdp:8"), config)
    assert line is None and tried == [("fsdp:8", None, "cpu:8", None)]
    # What these devices suffice for stays.
    config = make_config(plan=None, mesh="data=2")
    _, line = place_again(place_with([], []), config, config)
    assert line is None and tried == [(None, "data=2", None, None)]


def test_a_new_plan_for_more_devices_than_there_are(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    attach(monkeypatch, 4)
    stored = make_config(plan="fsdp:4 tp:2")

    def place(config: TrainConfig, _: Any) -> Any:
        raise PlanError(f"plan '{config.plan}' takes 8 devices, but cpu:4 has 4")

    with pytest.raises(PlanError, match="but cpu:4 has 4. Leave out --plan to scale the plan of the run to 4 devices$"):
        place_again(place, replace(stored, plan="fsdp:8"), stored)


def test_a_searched_plan_of_other_devices_is_searched_anew(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(plan=None)
    saved = SimpleNamespace(chosen="fsdp:8", target="cpu:8", mesh=SimpleNamespace(size=8))
    monkeypatch.setattr(resumption, "newest_plan", lambda _: saved)

    def place(_: TrainConfig, plan: Any) -> Any:
        return SimpleNamespace(plan=plan or SimpleNamespace(chosen="fsdp:4"))

    assert place_again(place, config, config) == (SimpleNamespace(plan=saved), None)
    attach(monkeypatch, 4)
    placed, line = place_again(place, config, config)
    assert placed.plan.chosen == "fsdp:4"
    assert line == "planned anew: the checkpoint's plan, fsdp:8, is for cpu:8; on cpu:4 the plan is fsdp:4"


def test_an_error_of_the_plan_without_new_options_is_kept(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user left out the plan of the run and keeps its mesh: there is no option to leave out."""
    attach(monkeypatch, 4)
    stored = make_config(plan="fsdp:8", mesh="data=8")

    def place(config: TrainConfig, _: Any) -> Any:
        raise PlanError("the mesh takes 8 devices, but cpu:4 has 4")

    with pytest.raises(PlanError, match="^the mesh takes 8 devices, but cpu:4 has 4$"):
        place_again(place, replace(stored, plan=None), stored)


def test_the_newest_readable_plan_is_found(make_config: MakeConfig, tmp_path: Path) -> None:
    x = jax.ShapeDtypeStruct((16, 8), "float32")
    made = autoshard.plan(lambda x: x * 2, x, target="cpu:8", plan="dp:8")
    config = make_config(run_dir=tmp_path / "run")
    assert resumption.newest_plan(config) is None
    with Checkpointer(tmp_path / "run" / "checkpoints", keep=None) as checkpoints:
        checkpoints.save(1, {"w": jnp.zeros(2)}, plan=made.to_json(), block=True)
        checkpoints.save(2, {"w": jnp.zeros(2)}, plan='{"format": "of another version"}', block=True)
    found = resumption.newest_plan(config)
    assert found is not None and found.to_json() == made.to_json()
    with Checkpointer(tmp_path / "run" / "checkpoints", keep=None) as checkpoints:
        checkpoints.save(3, {"w": jnp.zeros(2)}, block=True)
    assert resumption.newest_plan(config) is None  # the newest step was saved without a plan


def test_a_folder_without_a_run_cannot_be_resumed(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--resume: '.*empty' is not a run: give the folder of a run with --run-dir"):
        stored_config(make_config(run_dir=tmp_path / "empty"))
    with pytest.raises(ConfigError, match="--resume: 'None' is not a run"):
        stored_config(make_config(run_dir=None))


def test_a_mesh_is_scaled_without_a_plan_too(make_config: MakeConfig) -> None:
    config = make_config(plan=None, mesh="data=4,model=2")
    assert next(scalings(config, 4)).mesh == "data=2,model=2"
    named = next(scalings(replace(config, plan="data=fsdp:4 model=tp:2"), 2))
    assert (named.plan, named.mesh) == ("model=tp:2", "model=2")


QUICK = "train --preset quick --steps 3 --gpt.layers 1 --gpt.width 16 --gpt.heads 2 --gpt.context 16 --batch-size 8"


@pytest.mark.slow
def test_the_same_command_line_with_resume_goes_on(
    text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    line = [*QUICK.split(), "--plan=fsdp:8", "--sample-tokens=0", "--data", str(text_file), "--run-dir", str(tmp_path)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoshardWarning)  # the warm-up is shortened
        assert main(line) == 0
    again, output = main([*line, "--resume"]), capsys.readouterr()
    assert again == 0 and "the run continues from step 3" in output.out, output.err


def test_a_searched_variant_is_kept(make_config: MakeConfig) -> None:
    given = make_config(variants="search", microbatches=2)
    stored = replace(given, microbatches=4, gpt=replace(given.gpt, remat="full"))
    with pytest.warns(
        AutoshardWarning, match="--gpt.remat full --microbatches 4, not --gpt.remat none --microbatches 2"
    ):
        assert with_searched_variant(given, stored) == stored
    assert with_searched_variant(stored, stored) == stored
    other = replace(given, variants="given")
    assert with_searched_variant(other, stored) == other


def test_settings_that_differ_are_named_as_options(make_config: MakeConfig) -> None:
    stored = make_config(freeze=("embed", "blocks/*"), data=None)
    other = replace(stored, seed=5, freeze=(), data="x.txt", gpt=replace(stored.gpt, bias=True))
    with pytest.raises(ConfigError) as raised:
        check_same_run(other, stored)
    assert str(raised.value) == (
        f"'{stored.run_dir}' cannot be resumed with other settings: --data is x.txt, the run has none; --freeze is "
        "none, the run has embed 'blocks/*'; --gpt.bias is True, the run has False; --seed is 5, the run has 0. Give "
        "--freeze embed 'blocks/*' --gpt.no-bias --seed 0 and leave out --data, or give another --run-dir"
    )
    check_same_run(replace(stored, steps=99, plan=None), stored)


def test_a_newer_mesh_replaces_the_stored_plan_that_it_contradicts(
    make_config: MakeConfig, capsys: pytest.CaptureFixture
) -> None:
    config = make_config()  # with fsdp:8
    store(config)
    with warnings.catch_warnings():
        warnings.simplefilter("default", AutoshardWarning)
        assert main(["plan", "--resume", "--run-dir", str(config.run_dir), "--mesh", "data=4,model=2"]) == 0
    output = capsys.readouterr()
    assert "--mesh data=4,model=2 replaces --plan fsdp:8 of the resumed run" in output.err
    assert len(output.err.splitlines()) == 1 and "data 4 x model 2" in output.out


def store(config: TrainConfig) -> None:
    """Writes the folder of a run that has no checkpoints yet."""
    assert config.run_dir is not None
    run_directory.write_config(config.run_dir, to_dict(config))
    (config.run_dir / run_directory.CHECKPOINTS).mkdir(exist_ok=True)


@pytest.mark.parametrize(
    ("stored", "newer", "dropped"),
    [
        (dict(plan="fsdp:8"), dict(mesh="data=4,model=2"), ["plan"]),
        (dict(plan=None, mesh="data=4,model=2"), dict(plan="fsdp:8"), ["mesh"]),
        (dict(plan="data=fsdp:4 model=tp:2"), dict(mesh="data=4,model=2"), []),
        (dict(plan="fsdp:8"), dict(target="cpu:4"), ["plan"]),
        (dict(plan=None, mesh="data=4,model=2"), dict(target="cpu:4"), ["mesh"]),
        (dict(plan="fsdp:8"), dict(target="cpu:8"), []),
        (dict(plan="fsdp:8", target="cpu:8"), dict(plan="fsdp:4"), ["target"]),
        (dict(plan="fsdp:8"), dict(plan="tp:2 fsdp:4"), []),
    ],
)
def test_only_stored_settings_that_newer_ones_contradict_are_replaced(
    make_config: MakeConfig, stored: dict, newer: dict, dropped: list, recwarn: pytest.WarningsRecorder
) -> None:
    config = make_config(**stored)
    store(config)
    warnings.simplefilter("default", AutoshardWarning)
    given = replace(config, resume=True, **newer)
    assert with_newer_request(given) == replace(given, **dict.fromkeys(dropped))
    assert len(recwarn) == len(dropped)
