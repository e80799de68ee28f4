"""Runs that start from a pretrained folder: first values, resuming without the folder, adapters, and exports."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from autoshard.cli import main
from autoshard.errors import ConfigError
from autoshard.models import load_pretrained
from autoshard.models.adapters import LoraConfig, save_adapter
from autoshard.models.pretrained.parameter_paths import by_path
from autoshard.train.config.pretrained_config import PretrainedConfig
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.inference.pretrained_model import open_run_model
from autoshard.train.inference.trained_model import load_trained
from autoshard.train.run.loop import Trainer, train
from autoshard.train.run.metrics import read_metrics
from tests.models.adapters.test_adapters import adapted
from tests.models.pretrained.folders import DEEPSEEK_V3, GPT2, LLAMA, add_predicting_layer, make_folder
from tests.models.pretrained.quantized.folders import FP8, MXFP4_GPT_OSS, make_quantized_folder
from tests.train.run.test_resumption import attach

MakeConfig = Callable[..., TrainConfig]
CONFIG: dict[str, Any] = {**LLAMA, "vocab_size": 256, "num_hidden_layers": 2}
LORA = LoraConfig(rank=2, targets=("attention/*", "mlp/*"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a tiny model."""
    return make_folder(tmp_path / "model", CONFIG)


def of_folder(make_config: MakeConfig, folder: Path, *, dtype: Any = None, **changes: Any) -> TrainConfig:
    """Makes the config of a run that starts from a folder."""
    return make_config(pretrained=PretrainedConfig(folder, dtype=dtype), **changes)


def tensors(folder: Path, file: str = "model.safetensors") -> dict[str, np.ndarray]:
    """Reads the tensors of a folder."""
    return load_file(folder / file)


@pytest.mark.slow
def test_a_folder_with_other_names_is_read_in_its_own_spelling(make_config: MakeConfig, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "gpt2", {**GPT2, "vocab_size": 256, "n_positions": 64})
    renamed = {name.removeprefix("transformer."): x for name, x in tensors(folder).items()}
    save_file(renamed, folder / "model.safetensors")
    assert set(renamed) != set(tensors(make_folder(tmp_path / "prefixed", GPT2)))
    assert train(of_folder(make_config, folder)).step > 0


def test_a_run_starts_from_a_folder_continues_without_it_on_fewer_devices_and_is_exported(
    make_config: MakeConfig, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "tokenizer_config.json").write_text("{}")
    config = of_folder(make_config, folder, steps=2, optimizer=dict(warmup_steps=1))
    trainer = Trainer(config)
    batch = {name: x[:8] for name, x in trainer.source.batch(0, range(8)).items()}
    total, count = nnx.jit(lambda model: model.loss(batch))(load_pretrained(folder, plan="dp:8"))
    run_dir = trainer.run().run_dir
    first = read_metrics(run_dir / "metrics.jsonl")[0]
    assert first["loss"] == pytest.approx(float(total / count), rel=1e-5)
    before, tokenizer = tensors(folder), (folder / "tokenizer_config.json").read_bytes()
    shutil.rmtree(folder)
    attach(monkeypatch, 4)
    train(replace(config, resume=True, steps=3))
    assert main(["ckpt", "export", str(run_dir), str(tmp_path / "out")]) == 0
    after = tensors(tmp_path / "out")
    assert {name: x.shape for name, x in after.items()} == {name: x.shape for name, x in before.items()}
    assert all((after[name] != before[name]).any() for name in before if "norm" not in name)
    assert (tmp_path / "out" / "tokenizer_config.json").read_bytes() == tokenizer
    state = load_trained(run_dir).state
    np.testing.assert_array_equal(after["model.norm.weight"], state.params["norm"]["scale"])


@pytest.mark.slow
def test_an_imported_folder_is_step_0_of_a_run(
    make_config: MakeConfig, folder: Path, tmp_path: Path, text_file: Path
) -> None:
    run, out = str(tmp_path / "run"), tmp_path / "out"
    settings = ["--data", str(text_file), "--gpt.context", "16", "--batch-size", "8", "--plan", "fsdp:4 tp:2"]
    assert main(["ckpt", "import", str(folder), run, *settings, "--pretrained.no-scan-layers"]) == 0
    assert main(["ckpt", "export", f"{run}@0", str(out)]) == 0
    before, after = tensors(folder), tensors(out)
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)


@pytest.mark.slow
@pytest.mark.filterwarnings("always:.*has layer 2, which predicts one more token")
def test_tensors_that_the_model_does_not_use_stay_with_the_run(
    tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = make_folder(tmp_path / "model", {**DEEPSEEK_V3, "vocab_size": 256})
    copied = add_predicting_layer(folder, 2)
    before, run = tensors(folder), str(tmp_path / "run")
    settings = ["--data", str(text_file), "--gpt.context", "16", "--batch-size", "8", "--plan", "dp:8"]
    assert main(["ckpt", "import", str(folder), run, *settings]) == 0
    assert "`autoshard ckpt export` copies their values" in capsys.readouterr().err
    shutil.rmtree(folder)
    assert main(["ckpt", "export", run, str(tmp_path / "out")]) == 0
    after = tensors(tmp_path / "out")
    assert copied < before.keys() and before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)


@pytest.mark.slow
def test_a_run_with_adapters_beside_codes_resumes_without_the_folder(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    blocks = {**FP8, "weight_block_size": [8, 8]}
    folder = make_quantized_folder(tmp_path / "model", {**CONFIG, "dtype": "bfloat16", "quantization_config": blocks})
    losses = []
    for keep in (True, False):
        own = PretrainedConfig(folder, dtype="float32", keep_codes=keep)
        config = make_config(pretrained=own, lora=LORA, steps=3, run_dir=tmp_path / f"run-{keep}")
        trainer = Trainer(config)
        frozen = {str(leaf.dtype) for leaf in jax.tree.leaves(trainer.placed.state_shapes.frozen)}
        assert ("float8_e4m3fn" in frozen) is keep
        run_dir = trainer.run().run_dir
        losses.append([one["loss"] for one in read_metrics(run_dir / "metrics.jsonl") if "loss" in one])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    shutil.rmtree(folder)
    kept = make_config(
        pretrained=PretrainedConfig(folder, dtype="float32", keep_codes=True), lora=LORA, steps=4, resume=True,
        run_dir=tmp_path / "run-True",
    )  # fmt: skip
    assert train(kept).step == 4
    assert main(["ckpt", "export", str(kept.run_dir), str(tmp_path / "adapter")]) == 0
    assert main(["ckpt", "export", str(kept.run_dir), str(tmp_path / "out"), "--merge"]) == 2
    assert "codes of the folder" in capsys.readouterr().err
    assert kept.run_dir is not None
    generated = by_path(open_run_model(kept, kept.run_dir / "checkpoints").shapes)
    assert str(generated["segments/0/layers/0/attention/wq/base/codes"].dtype) == "float8_e4m3fn"


@pytest.mark.slow
def test_a_run_keeps_codes_of_4_bits(make_config: MakeConfig, tmp_path: Path) -> None:
    folder = make_quantized_folder(tmp_path / "model", {**MXFP4_GPT_OSS, "vocab_size": 256})
    own = PretrainedConfig(folder, dtype="float32", keep_codes=True)
    lora = replace(LORA, targets=("attention/*",))
    config = make_config(pretrained=own, lora=lora, steps=3, run_dir=tmp_path / "run")
    trainer = Trainer(config)
    assert "float4_e2m1fn" in {str(leaf.dtype) for leaf in jax.tree.leaves(trainer.placed.state_shapes.frozen)}
    trainer.run()
    shutil.rmtree(folder)
    kept = make_config(pretrained=own, lora=lora, steps=4, resume=True, run_dir=tmp_path / "run")
    assert train(kept).step == 4
    assert main(["ckpt", "export", str(kept.run_dir), str(tmp_path / "adapter")]) == 0


def test_with_adapters_nothing_else_is_trained_or_reduced(
    make_config: MakeConfig, folder: Path, tmp_path: Path
) -> None:
    config = of_folder(make_config, folder, lora=LORA, steps=3)
    trainer = Trainer(config)
    state = trainer.placed.state_shapes
    adapters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert adapters == 2 * 2 * (32 + 24 + 24 + 32 + 3 * 48)  # rank, layers, inputs and outputs
    moments = sum(leaf.size for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim)
    assert moments == 2 * adapters
    # Each device reduces its gradients of the adapters, in float32, and no others.
    reduced = [(kind, size, line) for kind, _, size, line in trainer.placed.plan.traffic if "reduce" in kind]
    gradients = sum(size for _, size, line in reduced if "Adapted" in line)
    assert gradients == pytest.approx(4 * adapters, rel=0.2)
    assert not any("layers.py" in line or "_logits" in line for _, _, line in reduced), reduced
    run_dir = trainer.run().run_dir
    for name, options in (("adapter", []), ("merged", ["--merge"])):
        assert main(["ckpt", "export", str(run_dir), str(tmp_path / name), *options]) == 0
    assert main(["ckpt", "merge", *(str(tmp_path / name) for name in ("model", "adapter", "same"))]) == 0
    base, merged, same = (tensors(tmp_path / name) for name in ("model", "merged", "same"))
    assert all((base[name] != merged[name]).any() == name.endswith("_proj.weight") for name in base)
    for name in base:
        np.testing.assert_allclose(merged[name], same[name], rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_adapters_of_dora_start_as_the_weights_are(make_config: MakeConfig, folder: Path, tmp_path: Path) -> None:
    run_dir = Trainer(of_folder(make_config, folder, lora=replace(LORA, dora=True))).save_first_state()
    state = load_trained(run_dir).state
    trained, frozen = by_path(state.params), by_path(state.frozen)
    (stem,) = (path.removesuffix("lora_scale") for path in trained if path.endswith("wo/lora_scale"))
    norms = np.linalg.norm(frozen[f"{stem}base"].reshape(2, -1, 16), axis=1)  # of 2 layers, over heads and their sizes
    np.testing.assert_allclose(trained[f"{stem}lora_scale"], norms, rtol=1e-6)


@pytest.fixture
def of_adapter(make_config: MakeConfig, folder: Path, tmp_path: Path) -> TrainConfig:
    """Saves an adapter, and returns the config of a run that starts from it."""
    lora = LoraConfig(rank=3, alpha=5, targets=("attention/wq", "mlp/*"), rslora=True, dora=True)
    save_adapter(adapted(folder, lora, CONFIG), tmp_path / "adapter", lora)
    return of_folder(make_config, folder, lora=LoraConfig(path=tmp_path / "adapter"), steps=3)


def test_a_run_starts_from_an_adapter(of_adapter: TrainConfig, tmp_path: Path) -> None:
    config = of_adapter
    run_dir = Trainer(config).save_first_state()
    assert main(["ckpt", "export", f"{run_dir}@0", str(tmp_path / "same")]) == 0
    before, after = (tensors(tmp_path / name, "adapter_model.safetensors") for name in ("adapter", "same"))
    assert before.keys() == after.keys() and all((before[name] == after[name]).all() for name in before)
    given = replace(config, lora=LoraConfig(path=tmp_path / "adapter", alpha=7, targets=("mlp/*",)))
    for other in (replace(given, run_dir=tmp_path / "other"), replace(given, resume=True)):
        with pytest.raises(
            ConfigError, match=r"lora\.alpha is 7, but the adapter has 5.*; lora\.targets is .*leave out"
        ):
            Trainer(other)


@pytest.mark.slow
def test_a_run_resumes_without_the_adapter_that_it_started_from(of_adapter: TrainConfig, tmp_path: Path) -> None:
    config = of_adapter
    run_dir = Trainer(config).save_first_state()
    before = tensors(tmp_path / "adapter", "adapter_model.safetensors")
    shutil.rmtree(tmp_path / "adapter")
    assert train(replace(config, resume=True)).step == 3
    assert main(["ckpt", "export", str(run_dir), str(tmp_path / "trained")]) == 0
    trained = tensors(tmp_path / "trained", "adapter_model.safetensors")
    assert all((before[name] != trained[name]).any() for name in before)
    assert main(["ckpt", "export", str(run_dir), str(tmp_path / "merged"), "--merge"]) == 0
    assert main(["ckpt", "merge", *(str(tmp_path / name) for name in ("model", "trained", "equal"))]) == 0
    merged, equal = (tensors(tmp_path / name) for name in ("merged", "equal"))
    for name in merged:
        np.testing.assert_allclose(merged[name], equal[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "bytes_left", "error"), [("int8", 0.32, 2e-3), pytest.param("nf4", 0.22, 5e-2, marks=pytest.mark.slow)]
)
def test_frozen_weights_in_few_bits_compute_nearly_the_same(
    make_config: MakeConfig, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture, form: Any, bytes_left: float,
    error: float,
) -> None:  # fmt: skip
    """A scale takes 4 bytes for 16 to 48 inputs here, and 4 bytes for 64 or more in a real model."""
    trainer = Trainer(of_folder(make_config, folder, lora=replace(LORA, quantize=form), steps=3))
    dense = sum(x.nbytes for name, x in tensors(folder).items() if ".layers." in name)
    frozen = jax.tree.leaves(trainer.placed.state_shapes.frozen["segments"])
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in frozen) < bytes_left * dense
    batch = {name: x[:8] for name, x in trainer.source.batch(0, range(8)).items()}
    total, count = nnx.jit(lambda model: model.loss(batch))(load_pretrained(folder, plan="dp:8"))
    run_dir = trainer.run().run_dir
    first = read_metrics(run_dir / "metrics.jsonl")[0]["loss"]
    assert 0 < abs(first / float(total / count) - 1) < error
    assert main(["ckpt", "export", str(run_dir), str(tmp_path / "adapter")]) == 0
    assert main(["ckpt", "merge", *(str(tmp_path / name) for name in ("model", "adapter", "out"))]) == 0
    capsys.readouterr()
    assert main(["ckpt", "export", str(run_dir), str(tmp_path / "merged"), "--merge"]) == 2
    message = capsys.readouterr().err
    assert f"the frozen weights of this run are {form}" in message and message.count("\n") == 1


@pytest.mark.slow
def test_parameters_may_be_float32_of_a_bfloat16_folder(make_config: MakeConfig, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", {**CONFIG, "dtype": "bfloat16"}, dtype="bfloat16")
    placed = Trainer(of_folder(make_config, folder)).placed
    assert placed.state_shapes.params["embed"].dtype == "bfloat16"
    assert "trained parameters and their moments are bfloat16" in str(placed.plan)
    config = of_folder(make_config, folder, dtype="float32")
    trainer = Trainer(replace(config, run_dir=tmp_path / "other"))
    assert "their moments are" not in str(trainer.placed.plan)
    run_dir = trainer.save_first_state()
    assert main(["ckpt", "export", str(run_dir), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    before, after = tensors(folder), tensors(tmp_path / "out")
    assert all((before[name] == after[name]).all() and after[name].dtype == "bfloat16" for name in before)
    wrong = make_folder(tmp_path / "wrong", {**CONFIG, "dtype": "bfloat16"})
    with pytest.raises(ConfigError, match=r"is float32, but its config\.json says bfloat16.*--pretrained\.dtype"):
        Trainer(replace(of_folder(make_config, wrong), run_dir=tmp_path / "third")).save_first_state()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--gpt.layers 3", "--gpt.layers is for the built-in model"),
        ("--model a:b", "give one of them"),
        ("--gpt.context 128", "the pretrained model has 64 positions: give fewer"),
        ("--lora.rank 2 --freeze embed", "leave out freeze"),
        ("--pretrained.keep-codes", "give --lora.rank"),
        ("--pretrained.keep-codes --lora.rank 2 --lora.quantize nf4", "are both given: give one"),
        ("--lora.path nowhere", "nowhere is not a LoRA adapter"),
        ("--lora.rank 2 --lora.targets norm", "matches no matrix"),
    ],
)
def test_settings_that_do_not_fit_the_folder_are_refused(
    folder: Path, tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture, arguments: str, message: str
) -> None:
    own = ["--from", str(folder), "--data", str(text_file), "--run-dir", str(tmp_path / "run"), "--gpt.context", "16"]
    assert main(["train", *own, *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "run").exists()


def test_a_damaged_folder_is_refused_before_anything_is_written(
    folder: Path, tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture
) -> None:
    own = ["--from", str(folder), "--data", str(text_file), "--run-dir", str(tmp_path / "run"), "--gpt.context", "16"]
    file, whole = folder / "model.safetensors", tensors(folder)
    missing = {name: x for name, x in whole.items() if name != "model.norm.weight"}
    for damage, message in ((lambda: os.truncate(file, 3000), "truncated"), (lambda: save_file(missing, file), "norm")):
        damage()
        assert main(["train", *own]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "run").exists()
