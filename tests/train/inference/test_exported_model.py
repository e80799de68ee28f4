"""A model rebuilt from a folder of checkpoints generates the same text as the run's own program."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from tokenizers import Tokenizer, models, pre_tokenizers

from autoshard.ckpt import Checkpointer, CheckpointError, CheckpointWarning
from autoshard.ckpt.exchange.export import write_model
from autoshard.ckpt.exchange.lora import read_model
from autoshard.cli import main
from autoshard.errors import ConfigError, DataError
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.data.tokenizer import load_codec
from autoshard.train.inference.exported_model import (
    FILE,
    TOKENIZER_FILE,
    open_generator,
    read_inference,
    write_inference,
)
from autoshard.train.inference.saved_parameters import StepParameters, averaged_parameters
from autoshard.train.inference.text_generation import sample_text
from autoshard.train.inference.trained_model import load_trained
from autoshard.train.program.build import make_program_of
from autoshard.train.run.loop import Trainer, train

MakeConfig = Callable[..., TrainConfig]


def moved(config: TrainConfig, tmp_path: Path) -> Path:
    """Move a run's checkpoints to another folder, without the other files of the run."""
    assert config.run_dir is not None
    return Path(shutil.move(config.run_dir / "checkpoints", tmp_path / "moved"))


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.parametrize("scan_layers", [True, False])
def test_it_generates_the_same_text_as_the_run(make_config: MakeConfig, tmp_path: Path, scan_layers: bool) -> None:
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
    expected = {
        use_ema: sample_text(
            trained.program, trained.state, load_codec(None), "the cat", 40, temperature=1.0, use_ema=use_ema
        )
        for use_ema in (True, False)
    }
    assert expected[True] != expected[False]
    folder = moved(config, tmp_path)
    for use_ema, text in expected.items():
        generated, plan = open_generator(folder, use_ema=use_ema).generate("the cat", 40, temperature=1.0)
        assert generated == text
        assert plan.mesh.size == jax.device_count()
        with Checkpointer(folder) as checkpoints:
            checkpoints.export(None, tmp_path / f"{use_ema}", use_ema=use_ema)
        assert open_generator(tmp_path / f"{use_ema}").generate("the cat", 40, temperature=1.0)[0] == text
    parameters = open_generator(folder).parameters
    assert isinstance(parameters, StepParameters) and parameters.use_ema
    seeds = [open_generator(folder).generate("the", 12, seed=seed, temperature=5.0)[0] for seed in (1, 1, 2)]
    assert seeds[0] == seeds[1] != seeds[2]


@pytest.mark.slow
@pytest.mark.whole
def test_a_mixture_of_experts_is_rebuilt(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's factory made the `MoE`. The folder describes it completely, and the user's module is not imported."""
    monkeypatch.chdir(Path(__file__).parents[1])  # the folder of user_code.py
    config = make_config(model="user_code:experts", steps=3, plan="dp:2 ep:4", optimizer=dict(learning_rate=0.1))
    train(config)
    trained = load_trained(config.run_dir or tmp_path)
    expected = sample_text(trained.program, trained.state, load_codec(None), "the", 8, temperature=0.0)
    folder = moved(config, tmp_path)
    inference = read_inference(folder)
    assert (inference.model, inference.max_length, inference.dtype) == ("moe", 16, "float32")
    assert inference.config["experts"] == 4 and inference.config["gpt"]["width"] == 16
    with Checkpointer(folder) as checkpoints:
        checkpoints.export(None, tmp_path / "out")
    exported = {
        name: json.loads((tmp_path / "out" / f"{name}.json").read_text()) for name in ("config", "generation_config")
    }
    assert exported["config"]["architectures"] == ["moe"] and exported["config"]["experts"] == 4
    assert exported["generation_config"] == {"do_sample": True, "temperature": 0.8, "top_k": 0, "max_length": 16}
    monkeypatch.setattr("sys.modules", {n: m for n, m in sys.modules.items() if n != "user_code"})
    monkeypatch.chdir(tmp_path)
    text, plan = open_generator(folder).generate("the", 8, temperature=0.0)
    assert text == expected and plan.mesh.size == jax.device_count()


def test_the_model_of_a_factory_is_rebuilt_if_the_caller_names_it(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The file keeps the name only for the message: whoever wrote the file must not choose the code that runs."""
    monkeypatch.chdir(Path(__file__).parents[1])  # the folder of user_code.py
    config, folder = make_config(model="user_code:factory"), tmp_path / "checkpoints"
    program = make_program_of(config)
    with Checkpointer(folder) as checkpoints:
        checkpoints.save(1, program.create_state(jax.random.key(0)), block=True)
    write_inference(folder, config, program)
    assert read_inference(folder).model == "user_code:factory"
    modules = {name: module for name, module in sys.modules.items() if name != "user_code"}
    with monkeypatch.context() as patch:
        patch.setattr("sys.modules", modules)
        with pytest.raises(ConfigError, match="not built in. If you trust that code, name it: --model user_code:fact"):
            open_generator(folder)
        assert "user_code" not in sys.modules
    assert main(["generate", str(folder), "--model", "user_code:factory", "--tokens", "20", "--temperature", "0"]) == 0
    text = capsys.readouterr().out
    with Checkpointer(folder, keep=None) as checkpoints:
        table = np.asarray(checkpoints.restore()["params"]["table"]["embedding"])
    tokens = [ord("\n")]
    for _ in range(20):  # a bigram: more than one window of 16 tokens
        tokens.append(int(table[tokens[-1]].argmax()))
    assert text == load_codec(None).decode(np.array(tokens)) + "\n"
    exported = tmp_path / "exported"
    assert main(["ckpt", "export", str(folder), str(exported)]) == 0
    capsys.readouterr()
    options = ["--model", "user_code:factory", "--tokens", "20", "--temperature", "0"]
    assert main(["generate", str(exported), *options]) == 0 and capsys.readouterr().out == text
    assert main(["generate", str(exported), *options, "--step", "1", "--use-ema"]) == 2
    assert "with one set of parameters: leave out --step and --use-ema" in capsys.readouterr().err
    for saved, message in (
        (
            {"other": table},
            "(?s)not those of its model.*table.embedding: the files have no.*other: the model has",
        ),
        ({"table.embedding": table[1:]}, r"table.embedding: the files have \[255, 256\], the model \[256, 256\]"),
    ):
        safetensors.numpy.save_file(saved, exported / "model.safetensors")
        with pytest.raises(ConfigError, match=message):
            open_generator(exported, factory="user_code:factory").generate("a", 1)
    (exported / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="exported' cannot be read: "):
        open_generator(exported, factory="user_code:factory").generate("a", 1)
    for name, message in (
        ("user_code:no_such", "has no function 'no_such'"),
        ("user_code:not_a_model", "returned int, not an nnx.Module"),
        ("user_code:experts", "is a checkpoint of another model: 12 of 19 leaves"),
    ):
        with pytest.raises((ConfigError, CheckpointError), match=message):
            open_generator(folder, factory=name).generate("a", 1)


@pytest.mark.slow
def test_an_average_without_an_update(make_config: MakeConfig) -> None:
    """By default the parameters are used instead, as in the run's evaluations."""
    config = make_config(ema_decay=0.5, ema_every=100, steps=3)
    train(config)
    assert config.run_dir is not None
    expected = open_generator(config.run_dir, use_ema=False).generate("the", 8, temperature=0.0)[0]
    assert open_generator(config.run_dir).generate("the", 8, temperature=0.0)[0] == expected
    with pytest.raises(ConfigError, match="has no moving average yet: leave out --use-ema"):
        open_generator(config.run_dir, use_ema=True).generate("the", 8)


@pytest.mark.slow
def test_the_tokenizer_is_copied(make_config: MakeConfig, tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "cat": 2, "sat": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[attr-defined]
    tokenizer.save(str(tmp_path / "words.json"))
    config = make_config(tokenizer=tmp_path / "words.json", steps=3)
    train(config)
    folder = moved(config, tmp_path)
    (tmp_path / "words.json").unlink()
    with Checkpointer(folder) as checkpoints:
        checkpoints.copy(None, tmp_path / "copy")
        checkpoints.export(None, tmp_path / "exported")
    write_model(read_model(tmp_path / "exported"), tmp_path / "again")  # as `ckpt merge` does
    for place in (folder, tmp_path / "copy", tmp_path / "exported", tmp_path / "again"):
        assert open_generator(place).generate("the cat", 3)[0].startswith("the cat")
    (folder / TOKENIZER_FILE).write_text((folder / TOKENIZER_FILE).read_text().replace("sat", "saw"))
    with pytest.raises(ConfigError, match="is not the tokenizer that the model was trained with"):
        open_generator(folder)
    (folder / TOKENIZER_FILE).unlink()
    with pytest.raises(DataError, match=r"tokenizer .* does not exist"):
        open_generator(folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # futures that Orbax drops
def test_a_damaged_step_is_skipped(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(steps=4, checkpoint_every=2)
    train(config)
    folder = moved(config, tmp_path)
    earlier, _ = open_generator(folder, 2).generate("the", 8, temperature=0.0)
    for file in (folder / "step_00000004" / "state").rglob("d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.warns(CheckpointWarning, match="(?s)step 4 in .* is damaged.*An earlier step is used"):
        assert open_generator(folder).generate("the", 8, temperature=0.0)[0] == earlier
    with pytest.raises(CheckpointError, match="step 4 in .* is damaged"):
        open_generator(folder, 4).generate("the", 8)


@pytest.mark.whole
def test_folders_without_a_usable_model(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist: give the folder of a run"):
        open_generator(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=f"has no {FILE}"):
        open_generator(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=f"has tensors, but no {FILE} that describes the model: export it again"):
        open_generator(tmp_path / "out")
    config = make_config(steps=3)
    train(config)
    folder = moved(config, tmp_path)
    whole = json.loads((folder / FILE).read_text())
    with pytest.raises(CheckpointError, match="there is no step 7"):
        open_generator(folder, 7)
    with pytest.raises(ConfigError, match="has no moving average: leave out --use-ema"):
        open_generator(folder, use_ema=True).generate("a", 1)
    with pytest.raises(ConfigError, match="the prompt is empty"):
        open_generator(folder).generate("", 1)
    with pytest.raises(ConfigError, match="top-k is 300, but the model's vocabulary has 256"):
        open_generator(folder).generate("a", 1, top_k=300)
    with pytest.raises(ConfigError, match="is 'gpt', which is built in: leave out --model"):
        open_generator(folder, factory="mine.models:make")
    for change, message in (
        ({"model": "mine.models:make"}, "is 'mine.models:make', which is not built in"),
        (
            {"format": 9},
            r"^\S*inference\.json has format 9, but this version reads formats up to 1: upgrade",
        ),
        ({"model": ["gpt"]}, r"^\S* is damaged: model is \['gpt'\]; it must be a name$"),
        ({"generation": {}}, "temperature is None; it must be at least 0 and finite"),
        ({"generation": {"temperature": "x"}}, "temperature is 'x'; it must be at least 0 and finite"),
        ({"generation": {"temperature": 1.0, "top_k": 0}}, "top_k is 0; it must be null or at least 1"),
        ({"tokenizer": {}}, "the tokenizer's kind is None; it must be 'bytes' or 'file'"),
        ({"tokenizer": {"kind": "file"}}, "the tokenizer's sha256 is None; it must be a text"),
        ({"config": whole["config"] | {"dtype": "float99"}}, "the architecture does not fit this version"),
        ({"config": {"layer": 3}}, "the architecture does not fit this version"),
        ({"config": whole["config"] | {"width": 32}}, "params/embed: saved float32"),
        ({"generation": None}, "config, generation and tokenizer must be tables"),
    ):
        (folder / FILE).write_text(json.dumps(whole | change))
        with pytest.raises((ConfigError, CheckpointError), match=message):
            open_generator(folder).generate("a", 1)
    assert main(["generate", str(folder), "--tokens", "1"]) == 2
    (folder / FILE).write_text("{")
    with pytest.raises(ConfigError, match="is damaged: JSONDecodeError"):
        read_inference(folder)


@pytest.mark.filterwarnings("ignore:.*attached devices are idle")
@pytest.mark.slow
def test_a_run_resumed_on_the_same_machine_keeps_its_plan(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(steps=3, plan="dp:2 fsdp:2 tp:2")
    train(config)
    resumed = replace(config, resume=True, steps=4, plan=None)
    assert dict(Trainer(resumed).placed.plan.mesh.shape) == {"dp": 2, "fsdp": 2, "tp": 2}
    elsewhere = Trainer(replace(resumed, mesh="data=4"))
    assert dict(elsewhere.placed.plan.mesh.shape) == {"data": 4}
    assert train(resumed).step == 4


def stored_model(tmp_path: Path, config: TrainConfig, **states: Any) -> Path:
    """Save states without training: `stored_model(tmp_path, config, step_2={"params": ...})`."""
    folder = tmp_path / "stored"
    with Checkpointer(folder, keep=None) as checkpoints:
        checkpoints.claim()
        for name, state in states.items():
            checkpoints.save(int(name.removeprefix("step_")), state, block=True)
    write_inference(folder, config, make_program_of(config))
    return folder


def weights(value: float) -> dict[str, jax.Array]:
    return {"w": jnp.full((4,), value, jnp.float32)}


def test_a_folder_without_a_checkpoint_has_no_model_yet(make_config: MakeConfig, tmp_path: Path) -> None:
    folder = stored_model(tmp_path, make_config())
    with pytest.raises(ConfigError, match="has no checkpoint yet: wait for the first save, or give another folder"):
        open_generator(folder)


def test_a_description_that_cannot_be_written_is_one_error(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = make_config()
    with pytest.raises(ConfigError, match=r"file' cannot be written: \[Errno"):
        write_inference(tmp_path / "file", config, make_program_of(config))


def test_only_the_tokenizer_of_the_training_is_used(make_config: MakeConfig, tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "cat": 2, "sat": 3}, unk_token="[UNK]"))
    tokenizer.save(str(tmp_path / "words.json"))
    folder = stored_model(tmp_path, make_config(tokenizer=tmp_path / "words.json"), step_1={"params": weights(1.0)})
    copy = folder / TOKENIZER_FILE
    assert copy.read_bytes() == (tmp_path / "words.json").read_bytes()
    assert open_generator(folder).codec.decode(np.array([2])) == "cat"
    written = copy.stat().st_mtime_ns
    write_inference(folder, make_config(tokenizer=tmp_path / "words.json"), make_program_of(make_config()))
    assert copy.stat().st_mtime_ns == written  # it is up to date
    copy.write_text(copy.read_text().replace("sat", "saw"))
    with pytest.raises(ConfigError, match="is not the tokenizer that the model was trained with: its SHA-256 is"):
        open_generator(folder)


def damage(step: Path) -> None:
    for file in (step / "state").rglob("d/*"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # futures that Orbax drops
def test_the_newest_intact_parameters_are_loaded(make_config: MakeConfig, tmp_path: Path) -> None:
    states = {f"step_{step}": {"params": weights(step)} for step in (1, 2)}
    folder = stored_model(tmp_path, make_config(), **states)
    newest = open_generator(folder)
    np.testing.assert_array_equal(newest.parameters(weights(0))["w"], [2.0] * 4)
    damage(folder / "step_00000002")
    with pytest.warns(CheckpointWarning, match="(?s)step 2 in .* is damaged.*An earlier step is used"):
        np.testing.assert_array_equal(newest.parameters(weights(0))["w"], [1.0] * 4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # futures that Orbax drops
def test_without_intact_parameters_there_is_an_error(make_config: MakeConfig, tmp_path: Path) -> None:
    folder = stored_model(tmp_path, make_config(), step_1={"params": weights(1)})
    np.testing.assert_array_equal(open_generator(folder, 1).parameters(weights(0))["w"], [1.0] * 4)
    with pytest.raises(CheckpointError, match="params/v"):
        open_generator(folder).parameters({"v": jnp.zeros((4,))})
    damage(folder / "step_00000001")
    with pytest.raises(CheckpointError, match="step 1 in .* is damaged"):
        open_generator(folder).parameters(weights(0))


def test_a_moving_average_is_divided_by_its_weight(make_config: MakeConfig, tmp_path: Path) -> None:
    """Frozen parameters have no average."""
    ema = {"mean": weights(0.5), "weight": jnp.float32(0.25)}
    state = {"params": weights(1), "ema": ema, "frozen": {"table": jnp.full((2,), 9.0)}}
    folder = stored_model(tmp_path, make_config(ema_decay=0.5), step_1=state)
    loaded = averaged_parameters(Checkpointer(folder, keep=None), 1, weights(0) | {"table": jnp.zeros((2,))})
    np.testing.assert_array_equal(loaded["w"], [2.0] * 4)
    np.testing.assert_array_equal(loaded["table"], [9.0] * 2)


def test_a_moving_average_before_its_first_update(make_config: MakeConfig, tmp_path: Path) -> None:
    state = {"params": weights(1), "ema": {"mean": weights(0), "weight": jnp.float32(0)}}
    folder = stored_model(tmp_path, make_config(ema_decay=0.5), step_2=state)
    checkpoints = Checkpointer(folder, keep=None)
    with pytest.raises(ConfigError, match="step 2 in .* has no moving average yet: leave out --use-ema"):
        averaged_parameters(checkpoints, 2, weights(0))
    np.testing.assert_array_equal(averaged_parameters(checkpoints, 2, weights(0), or_parameters=True)["w"], [1.0] * 4)


def test_a_checkpoint_without_a_moving_average(make_config: MakeConfig, tmp_path: Path) -> None:
    folder = stored_model(tmp_path, make_config(), step_3={"params": weights(1)})
    with pytest.raises(ConfigError, match="step 3 in .* has no moving average: leave out --use-ema"):
        averaged_parameters(Checkpointer(folder, keep=None), 3, weights(0), or_parameters=True)
