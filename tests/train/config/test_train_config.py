"""Where settings come from, and how mistakes in them are reported."""

import dataclasses
import json
from pathlib import Path

import pytest

from autoshard.errors import AutoshardWarning, ConfigError
from autoshard.train.config.command_line import parse_config
from autoshard.train.config.merging import changed_settings, merge
from autoshard.train.config.presets import PRESETS
from autoshard.train.config.stored_config import from_dict, identity, to_dict
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.step.optimizer import learning_rate_schedule


def parse(*arguments: str) -> TrainConfig:
    return parse_config(arguments, TrainConfig, "autoshard train", "")


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(
        'steps = 7\nbatch_size = 16\nfreeze = ["embed"]\n[gpt]\nlayers = 2\n[optimizer]\nlearning_rate = 1\n'
    )
    return path


def test_options_override_toml_which_overrides_the_preset(toml: Path) -> None:
    with pytest.warns(AutoshardWarning, match="warm-up of preset shakespeare"):
        config = parse("--preset", "shakespeare", "--config", str(toml), "--steps", "9", "--optimizer.beta1", "0.5")
    assert (config.steps, config.batch_size, config.freeze) == (9, 16, ("embed",))
    assert (config.gpt.layers, config.gpt.context) == (2, 64)
    assert (config.optimizer.learning_rate, config.optimizer.beta1, config.optimizer.beta2) == (1.0, 0.5, 0.99)
    assert config.preset == "shakespeare"


def test_without_options_the_run_is_the_quick_one() -> None:
    assert parse() == PRESETS["quick"]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_know_their_names(name: str) -> None:
    assert parse("--preset", name).preset == name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "quik"], "unknown preset 'quik': did you mean quick"),
        (["--preset"], "preset"),
        (["--stps", "3"], "unknown option --stps: did you mean --steps"),
        (["--optimizer.learning-rat=3"], "did you mean --optimizer.learning-rate"),
        (["--steps", "many"], "^--steps is 'many'; it must be a whole number$"),
        (["--steps=1.5"], "^--steps is '1.5'; it must be a whole number$"),
        (["--optimizer.beta1", "much"], "^--optimizer.beta1 is 'much'; it must be a number$"),
        (["--memory-limit-bytes", "4GB"], "^--memory-limit-bytes is '4GB'; it must be a whole number$"),
        (["--steps", "-1"], "steps is -1"),
        (["--gpt.heads", "3"], "width 128 is not a multiple of heads 3"),
        (["--microbatches", "3"], "batch_size 64 does not divide into 3 microbatches"),
        (["--deadline-seconds", "0"], "deadline_seconds is 0.0; it must be positive"),
        (["--ema-decay", "1"], "ema_decay is 1.0; it must be at least 0 and below 1"),
        (["--virtual-devices", "0"], "virtual_devices is 0; it must be at least 1"),
        (["--allow-other-data"], "allow_other_data is only for resumed runs: add --resume"),
        (["stray"], "stray"),
        (["--config", "nowhere.toml"], "'nowhere.toml' cannot be read"),
        (["--resume", "--run-dir", "nowhere"], "'nowhere' is not a run: config.json is missing"),
    ],
)
def test_wrong_options_are_reported_in_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        parse(*arguments)
    assert "\n" not in str(raised.value)


def test_the_warm_up_of_a_preset_fits_a_shorter_run() -> None:
    with pytest.warns(
        AutoshardWarning, match="warm-up of preset quick is 25 steps, but the run has 20: it is shortened to 2. Set "
    ):
        short = parse("--steps", "20")
    assert short.optimizer == dataclasses.replace(PRESETS["quick"].optimizer, warmup_steps=2)
    assert learning_rate_schedule(short.optimizer, short.steps)(2) == pytest.approx(short.optimizer.learning_rate)
    with pytest.warns(AutoshardWarning, match="it is shortened to 0"):
        assert parse("--steps", "4").optimizer.warmup_steps == 0
    assert parse("--steps", "26").optimizer.warmup_steps == 25 and parse("--steps", "0").optimizer.warmup_steps == 25


def test_a_warm_up_set_by_the_user_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("steps = 20\n[optimizer]\nwarmup_steps = 25\n")
    for arguments in (["--optimizer.warmup-steps=25"], ["--optimizer.warmup_steps", "25"], ["--config", str(path)]):
        assert parse("--steps", "20", *arguments).optimizer.warmup_steps == 25
    (tmp_path / "config.json").write_text(json.dumps(to_dict(PRESETS["quick"])))
    resumed = parse("--resume", "--run-dir", str(tmp_path), "--steps", "20")  # a resumed run keeps its settings
    assert resumed.optimizer.warmup_steps == 25


def test_a_resumed_run_keeps_what_was_fitted_to_it(tmp_path: Path) -> None:
    """The preset is named again. Settings that may change on resume are the preset's, as in a new run."""
    line = ["--preset", "shakespeare", "--gpt.layers=2", "--run-dir", str(tmp_path)]
    with pytest.warns(AutoshardWarning, match="it is shortened to 2"):
        started = parse(*line, "--steps=50")
    (tmp_path / "config.json").write_text(json.dumps(to_dict(started)))
    assert parse(*line, "--steps=50", "--resume") == dataclasses.replace(started, resume=True)
    longer = parse(*line, "--resume", "--optimizer.beta1=0.5")
    assert (longer.steps, longer.optimizer.warmup_steps, longer.optimizer.beta1) == (2000, 2, 0.5)
    other = parse("--preset", "quick", "--run-dir", str(tmp_path), "--resume")  # refused when the run starts
    assert other.gpt == PRESETS["quick"].gpt


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stps = 3", "unknown setting 'stps': did you mean steps"),
        ("[gpt]\nlayer = 3", r"\[gpt\]: unknown setting 'layer': did you mean layers"),
        ("steps = 'many'", "steps is 'many'; it must be a whole number"),
        ("steps = true", "steps is True; it must be a whole number"),
        ("steps = 1.5", "steps is 1.5; it must be a whole number"),
        ("[optimizer]\nname = 'adan2'", r"name is 'adan2'; did you mean 'adan'\?"),
        ("freeze = [1]", r"freeze\[0\] is 1; it must be text"),
        ("gpt = 3", r"write \[gpt\]"),
        ("freeze = 'embed'", "freeze is 'embed'; it must be a list"),
        ("[gpt]\nheads = 3", "not a multiple of heads 3"),
        ("steps = ", "is not a TOML file"),
    ],
)
def test_mistakes_in_toml_are_reported_with_the_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as raised:
        parse("--config", str(path))
    assert str(path) in str(raised.value)


def test_a_config_round_trips_through_json() -> None:
    config = dataclasses.replace(PRESETS["llama-7b"], run_dir=Path("x"), freeze=("a", "b"), memory_limit_bytes=5)
    assert from_dict(to_dict(config), "here") == config


def test_settings_of_the_training_may_not_change_on_resume() -> None:
    config = TrainConfig()
    longer = merge(config, {"steps": 5, "plan": "fsdp:8", "log_every": 1}, "here")
    assert identity(longer) == identity(config)
    other = merge(config, {"seed": 1, "gpt": {"layers": 3}}, "here")
    assert changed_settings(identity(config), identity(other)) == [("gpt.layers", 4, 3), ("seed", 0, 1)]
    trained = {"model", "data", "tokenizer", "batch_size", "microbatches", "seed", "freeze", "gpt"}
    averaged = {"ema_decay", "ema_every", "ema_spike"}
    assert identity(config).keys() == trained | averaged | {"optimizer", "pretrained", "lora", "rows", "loss", "dpo"}


def test_a_sample_needs_a_prompt() -> None:
    with pytest.raises(ConfigError, match="prompt is empty, but a sample continues it"):
        TrainConfig(prompt="")
    assert TrainConfig(prompt="", sample_tokens=0).prompt == ""
