"""Old names of settings: accepted with a warning on the command line, in files and as Python keywords."""

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import optax
import pytest

import autoshard
from autoshard.cli import main
from autoshard.errors import ConfigError
from autoshard.models.workloads import workload
from autoshard.train.config.command_line import parse_config
from autoshard.train.config.presets import PRESETS
from autoshard.train.config.stored_config import from_dict, to_dict
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.old_names import accepts_old_keywords, current_options
from autoshard.train.program.build import workload_step, workload_variants
from autoshard.train.step.train_step import make_train_step

OLD: dict[str, Any] = {"accumulation": 2}  # spelled so that the type checker does not look at the keyword


def parse(*arguments: str) -> TrainConfig:
    return parse_config(arguments, TrainConfig, "autoshard train", "")


@pytest.mark.parametrize("arguments", [["--accumulation", "2"], ["--accumulation=2"]])
def test_the_old_option_sets_the_new_setting(arguments: list[str]) -> None:
    with pytest.warns(FutureWarning, match="^--accumulation is now --microbatches; the old name is removed in 0.3$"):
        assert parse(*arguments).microbatches == 2


def test_the_new_option_does_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    assert parse("--microbatches", "2").microbatches == 2
    assert not recwarn.list


def test_both_names_of_an_option_are_an_error() -> None:
    with pytest.raises(ConfigError, match="^--accumulation is the old name of --microbatches; give --mi"):
        parse("--accumulation", "2", "--microbatches", "2")


def test_arguments_after_the_separator_are_not_options() -> None:
    assert current_options(["--steps", "3", "--", "--accumulation"]) == ["--steps", "3", "--", "--accumulation"]


@pytest.mark.parametrize("command", ["plan", "plan gpt-tiny"])
def test_the_command_reports_the_old_option_in_one_line(command: str, capsys: pytest.CaptureFixture) -> None:
    """The value is wrong, so that nothing is planned: the error comes after the warning and names microbatches."""
    assert main([*command.split(), "--target", "cpu:8", "--accumulation", "3"]) == 2
    warning, error = capsys.readouterr().err.splitlines()
    assert warning == "autoshard: warning: --accumulation is now --microbatches; the old name is removed in 0.3"
    assert "does not divide into 3 microbatches" in error


def test_the_old_key_of_a_saved_run_is_read(tmp_path: Path) -> None:
    stored = to_dict(PRESETS["llama-7b"])
    assert stored["microbatches"] == 2
    stored["accumulation"] = stored.pop("microbatches")
    with pytest.warns(FutureWarning, match="^here: setting 'accumulation' is now 'microbatches'; the old name is "):
        assert from_dict(stored, "here") == PRESETS["llama-7b"]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.warns(FutureWarning, match="is now 'microbatches'"):
        assert parse("--resume", "--run-dir", str(tmp_path)).microbatches == 2


def test_the_old_key_of_a_toml_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("accumulation = 4\n")
    with pytest.warns(FutureWarning, match="run.toml: setting 'accumulation' is now 'microbatches'"):
        assert parse("--config", str(path)).microbatches == 4
    path.write_text("accumulation = 4\nmicrobatches = 4\n")
    with pytest.raises(ConfigError, match="'accumulation' is the old name of 'microbatches'; give"):
        parse("--config", str(path))


def test_the_old_field_of_a_config_works() -> None:
    with pytest.warns(DeprecationWarning, match=r"\(accumulation=...\) is now TrainConfig\(microbatches=...\)"):
        config = TrainConfig(**OLD)
    assert config.microbatches == 2
    with pytest.warns(DeprecationWarning, match="accumulation=..."):
        assert dataclasses.replace(TrainConfig(microbatches=4), **OLD) == config
    with pytest.warns(DeprecationWarning, match="TrainConfig.accumulation is now TrainConfig.microbatches"):
        assert config.accumulation == 2


@pytest.mark.parametrize(
    "make",
    [
        lambda **options: make_train_step(Any, optax.constant_schedule(1.0), **options),  # type: ignore[arg-type]
        lambda **options: workload_step(workload("gpt-tiny"), **options),
    ],
)
def test_the_old_keyword_of_a_function_works(make: Callable[..., Any]) -> None:
    with pytest.warns(DeprecationWarning, match=r"\(accumulation=...\) is now .*\(microbatches=...\)"):
        make(**OLD)
    with pytest.raises(TypeError, match="got both 'microbatches' and its old name 'accumulation'"):
        make(microbatches=2, **OLD)


def test_a_keyword_without_an_old_name_is_passed_on() -> None:
    @accepts_old_keywords
    def function(steps: int, *, seed: int) -> tuple[int, int]:
        return steps, seed

    assert function(3, seed=4) == (3, 4)


def test_a_saved_plan_with_the_old_variant_is_read_and_bound() -> None:
    """The JSON keeps the keyword that the plan was made with, and the step accepts it."""
    work = workload("gpt-tiny")
    step, *shapes = workload_variants(work)
    plan = autoshard.plan(
        step,
        *shapes,
        target="cpu:8",
        plan="fsdp:8",
        variants={"remat": ["none"], "microbatches": [2]},
        donate_argnums=0,
    )
    text = plan.to_json()
    assert '"microbatches": 2' in text
    old = autoshard.Plan.from_json(text.replace('"microbatches"', '"accumulation"'))
    assert dict(old.variant) == {"remat": "none", "accumulation": 2}
    with pytest.warns(DeprecationWarning, match="accumulation"):
        bound = old.bind(partial(step, **old.variant), *shapes)
    assert bound.in_specs == plan.in_specs
