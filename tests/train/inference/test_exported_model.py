"""A folder of checkpoints alone: the model is rebuilt from it, and writes what the run's own program writes."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from autoshard.ckpt import Checkpointer, CheckpointError, CheckpointWarning
from autoshard.cli import main
from autoshard.errors import ConfigError, DataError
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.data.tokenizer import load_codec
from autoshard.train.inference.exported_model import FILE, TOKENIZER, open_writer, read_inference
from autoshard.train.inference.text_generation import sample_text
from autoshard.train.inference.trained_model import load_trained
from autoshard.train.run.loop import Trainer, train

MakeConfig = Callable[..., TrainConfig]


def moved(config: TrainConfig, tmp_path: Path) -> Path:
    """A run's checkpoints at another place, where nothing else of the run is."""
    assert config.run_dir is not None
    return Path(shutil.move(config.run_dir / "checkpoints", tmp_path / "moved"))


@pytest.mark.whole
@pytest.mark.parametrize("scan_layers", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_it_writes_what_the_run_writes(make_config: MakeConfig, tmp_path: Path, scan_layers: bool) -> None:
    shape = dict(layers=2, width=32, heads=4, kv_heads=2, context=64, scan_layers=scan_layers)
    config = make_config(
        gpt=shape,
        ema_decay=0.5,
        freeze=("blocks/*attention/*",),
        steps=4,
        optimizer=dict(learning_rate=0.1),
        plan="dp:2 fsdp:2 tp:2",
    )
    train(config)
    assert config.run_dir is not None
    trained = load_trained(config.run_dir)
    want = {
        use_ema: sample_text(
            trained.program, trained.state, load_codec(None), "the cat", 40, temperature=1.0, use_ema=use_ema
        )
        for use_ema in (True, False)
    }
    assert want[True] != want[False]
    folder = moved(config, tmp_path)
    for use_ema, text in want.items():
        found, plan = open_writer(folder, use_ema=use_ema).write("the cat", 40, temperature=1.0)
        assert found == text
        assert plan.mesh.size == jax.device_count()
    assert open_writer(folder).use_ema
    seeds = [open_writer(folder).write("the", 12, seed=seed, temperature=5.0)[0] for seed in (1, 1, 2)]
    assert seeds[0] == seeds[1] != seeds[2]


@pytest.mark.whole
def test_a_mixture_of_experts_writes_too(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody's function made it: the folder says all that a `MoE` needs, and nothing of theirs is imported again."""
    monkeypatch.chdir(Path(__file__).parent)
    config = make_config(model="user_code:experts", steps=3, plan="dp:2 ep:4", optimizer=dict(learning_rate=0.1))
    train(config)
    trained = load_trained(config.run_dir or tmp_path)
    want = sample_text(trained.program, trained.state, load_codec(None), "the", 8, temperature=0.0)
    folder = moved(config, tmp_path)
    told = read_inference(folder)
    assert (told.model, told.max_length, told.dtype) == ("moe", 16, "float32")
    assert told.config["experts"] == 4 and told.config["gpt"]["width"] == 16
    with Checkpointer(folder) as checkpoints:
        checkpoints.export(None, tmp_path / "out")
    said = {
        name: json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in ("config", "generation_config")
    }
    assert said["config"]["architectures"] == ["moe"] and said["config"]["experts"] == 4
    assert said["generation_config"] == {"do_sample": True, "temperature": 0.8, "top_k": 0, "max_length": 16}
    monkeypatch.setattr("sys.modules", {n: m for n, m in sys.modules.items() if n != "user_code"})
    monkeypatch.chdir(tmp_path)
    found, plan = open_writer(folder).write("the", 8, temperature=0.0)
    assert found == want and plan.mesh.size == jax.device_count()


@pytest.mark.whole
def test_an_average_that_was_not_updated_yet(make_config: MakeConfig) -> None:
    """The parameters write where nobody asked for the average, as they are evaluated in the run."""
    config = make_config(ema_decay=0.5, ema_every=100, steps=3)
    train(config)
    assert config.run_dir is not None
    want = open_writer(config.run_dir, use_ema=False).write("the", 8, temperature=0.0)[0]
    assert open_writer(config.run_dir).write("the", 8, temperature=0.0)[0] == want
    with pytest.raises(ConfigError, match="has no moving average yet: leave out --use-ema"):
        open_writer(config.run_dir, use_ema=True).write("the", 8)


@pytest.mark.whole
def test_its_tokenizer_comes_with_it(make_config: MakeConfig, tmp_path: Path) -> None:
    made = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "cat": 2, "sat": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[attr-defined]
    made.save(str(tmp_path / "words.json"))
    config = make_config(tokenizer=tmp_path / "words.json", steps=3)
    train(config)
    folder = moved(config, tmp_path)
    (tmp_path / "words.json").unlink()
    with Checkpointer(folder) as checkpoints:
        checkpoints.copy(None, tmp_path / "copy")
    for place in (folder, tmp_path / "copy"):
        assert open_writer(place).write("the cat", 3)[0].startswith("the cat")
    (folder / TOKENIZER).write_text((folder / TOKENIZER).read_text().replace("sat", "saw"))
    with pytest.raises(ConfigError, match="is not the tokenizer that the model was trained with"):
        open_writer(folder)
    (folder / TOKENIZER).unlink()
    with pytest.raises(DataError, match=r"tokenizer .* does not exist"):
        open_writer(folder)


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax drops futures
def test_a_damaged_step_is_passed_over(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(steps=4, checkpoint_every=2)
    train(config)
    folder = moved(config, tmp_path)
    earlier, _ = open_writer(folder, 2).write("the", 8, temperature=0.0)
    for file in (folder / "step_00000004" / "state").rglob("d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.warns(CheckpointWarning, match="(?s)step 4 in .* is damaged.*An earlier step is taken"):
        assert open_writer(folder).write("the", 8, temperature=0.0)[0] == earlier
    with pytest.raises(CheckpointError, match="step 4 in .* is damaged"):
        open_writer(folder, 4).write("the", 8)


@pytest.mark.whole
def test_folders_that_no_text_can_be_written_from(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no checkpoints: there is no such folder"):
        open_writer(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=f"has no {FILE}"):
        open_writer(tmp_path)
    config = make_config(steps=3)
    train(config)
    folder = moved(config, tmp_path)
    whole = json.loads((folder / FILE).read_text())
    with pytest.raises(CheckpointError, match="there is no step 7"):
        open_writer(folder, 7)
    with pytest.raises(ConfigError, match="has no moving average: leave out --use-ema"):
        open_writer(folder, use_ema=True).write("a", 1)
    with pytest.raises(ConfigError, match="the prompt is empty"):
        open_writer(folder).write("", 1)
    with pytest.raises(ConfigError, match="top-k is 300, the model's vocabulary has 256"):
        open_writer(folder).write("a", 1, top_k=300)
    for change, message in (
        ({"model": "mine.models:make"}, "is 'mine.models:make', which is not a built-in one"),
        ({"format": 9}, r"^\S*inference\.json has format 9, this version reads up to 1: upgrade$"),
        ({"model": ["gpt"]}, r"^\S* is not as it was written: model is \['gpt'\], it must be a name$"),
        ({"generation": {}}, "temperature is None, it must be at least 0 and finite"),
        ({"generation": {"temperature": "x"}}, "temperature is 'x', it must be at least 0 and finite"),
        ({"generation": {"temperature": 1.0, "top_k": 0}}, "top_k is 0, it must be null or at least 1"),
        ({"tokenizer": {}}, "the tokenizer's kind is None, it must be 'bytes' or 'file'"),
        ({"tokenizer": {"kind": "file"}}, "the tokenizer's sha256 is None, it must be a text"),
        ({"config": whole["config"] | {"dtype": "float99"}}, "the architecture does not fit this version"),
        ({"config": {"layer": 3}}, "the architecture does not fit this version"),
        ({"config": whole["config"] | {"width": 32}}, "params/embed: saved float32"),
        ({"generation": None}, "config, generation and tokenizer are tables"),
    ):
        (folder / FILE).write_text(json.dumps(whole | change))
        with pytest.raises((ConfigError, CheckpointError), match=message):
            open_writer(folder).write("a", 1)
        assert main(["generate", str(folder), "--tokens", "1"]) == 2
    (folder / FILE).write_text("{")
    with pytest.raises(ConfigError, match="is not as it was written: JSONDecodeError"):
        read_inference(folder)


@pytest.mark.whole
def test_a_run_that_goes_on_where_it_was_keeps_its_plan(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(steps=3, plan="dp:2 fsdp:2 tp:2")
    train(config)
    again = replace(config, resume=True, steps=4, plan=None)
    assert dict(Trainer(again).placed.plan.mesh.shape) == {"dp": 2, "fsdp": 2, "tp": 2}
    elsewhere = Trainer(replace(again, mesh="data=4"))
    assert dict(elsewhere.placed.plan.mesh.shape) == {"data": 4}
    assert train(again).step == 4
