"""Copies and exports of steps, and the differences between two steps."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file

from autoshard.ckpt import Checkpointer, CheckpointError, DamagedCheckpointError
from autoshard.ckpt.restore.checkpoint_diff import compare
from autoshard.cli import main


def train_state(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(64, 32)).astype(np.float32)
    return {
        "step": jnp.int32(seed),
        "params": {"layers": {"w": jnp.asarray(w), "half": jnp.asarray(w[0], jnp.bfloat16)}, "head": jnp.asarray(-w)},
        "frozen": {"table": jnp.arange(6, dtype=jnp.int32)},
        "variables": {},
        "opt_state": {"mu": jnp.asarray(w * 2)},
        "ema": {
            "mean": {"layers": {"w": jnp.asarray(w / 4), "half": jnp.asarray(w[0] / 4)}, "head": jnp.asarray(w)},
            "weight": jnp.float32(0.5),
        },
        "key": jax.random.key(0),
    }


@pytest.fixture
def saved(tmp_path: Path) -> Checkpointer:
    checkpoints = Checkpointer(tmp_path / "run")
    for step in (1, 2):
        checkpoints.save(step, train_state(step), config={"model": {"name": "gpt", "width": 32}}, block=True)
    checkpoints.close()
    return checkpoints


def damage(step: Path) -> None:
    """Flip bits in every payload file. Orbax distributes the arrays over these files as their writes happen to end."""
    for file in (step / "state").rglob("d/*"):
        content = bytearray(file.read_bytes())
        for tenth in range(1, 10):
            content[len(content) * tenth // 10] ^= 4
        file.write_bytes(content)


def test_an_exported_model_is_the_parameters(saved: Checkpointer, tmp_path: Path) -> None:
    exported = saved.export(2, tmp_path / "out")
    assert set(exported.files) == {"model.safetensors", "config.json"}
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    want = train_state(2)["params"] | train_state(2)["frozen"]
    assert set(tensors) == {"layers.w", "layers.half", "head", "table"}
    np.testing.assert_array_equal(tensors["layers.w"], want["layers"]["w"])
    assert tensors["layers.half"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(tensors["layers.half"], want["layers"]["half"])
    np.testing.assert_array_equal(tensors["table"], want["table"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"architectures": ["gpt"], "dtype": "float32", "width": 32}


def test_an_export_with_sampling_settings(saved: Checkpointer, tmp_path: Path) -> None:
    inference: dict[str, Any] = {"model": "moe", "config": {"experts": 4}, "max_length": 64}
    inference |= {"generation": {"temperature": 0.8, "top_k": None, "use_ema": False}}
    file, settings_name = tmp_path / "run" / "inference.json", "generation_config.json"
    for number, (generation, want) in enumerate(
        [
            ({}, {"do_sample": True, "temperature": 0.8, "top_k": 0, "max_length": 64}),
            ({"top_k": 40}, {"do_sample": True, "temperature": 0.8, "top_k": 40, "max_length": 64}),
            ({"temperature": 0.0}, {"do_sample": False, "max_length": 64}),
        ]
    ):
        file.write_text(json.dumps(inference | {"generation": inference["generation"] | generation}))
        out = tmp_path / str(number)
        assert set(saved.export(2, out).files) == {"model.safetensors", "config.json", settings_name, file.name}
        assert json.loads((out / settings_name).read_text()) == want
        config = json.loads((out / "config.json").read_text())
        assert config == {"architectures": ["moe"], "dtype": "float32", "experts": 4}
    file.write_text(json.dumps(inference | {"generation": {}}))
    with pytest.raises(CheckpointError, match=r"inference\.json is damaged: KeyError: 'temperature'"):
        saved.export(2, tmp_path / "out")
    for change, message in (
        ({"format": 9}, r"^\S*inference\.json has format 9, this version reads up to 1: upgrade$"),
        ({"model": ["gpt"]}, r"is damaged: ValueError: model is \['gpt'\]; it must be a name"),
        ({"max_length": float("inf")}, "is damaged: OverflowError"),
    ):
        file.write_text(json.dumps(inference | change))
        with pytest.raises(CheckpointError, match=message):
            saved.export(2, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_exported_average_is_debiased_and_has_the_saved_dtypes(saved: Checkpointer, tmp_path: Path) -> None:
    saved.export(None, tmp_path / "out", use_ema=True, shard_bytes=5000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {"layers.w", "layers.half", "head", "table"}
    assert index["metadata"]["total_size"] == 2 * 64 * 32 * 4 + 32 * 2 + 6 * 4
    tensors = {}
    for file in sorted(set(index["weight_map"].values())):
        assert file.startswith("model-0000") and file.endswith("-of-00004.safetensors")
        tensors |= load_file(tmp_path / "out" / file)
    mean = train_state(2)["ema"]["mean"]
    np.testing.assert_array_equal(tensors["layers.w"], mean["layers"]["w"] / 0.5)
    assert tensors["layers.half"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(tensors["head"], mean["head"] / 0.5)


@pytest.mark.parametrize("evaluated", [True, False, None], ids=["average", "parameters", "no inference.json"])
def test_the_command_exports_what_was_evaluated(
    saved: Checkpointer, tmp_path: Path, capsys: pytest.CaptureFixture, evaluated: bool | None
) -> None:
    if evaluated is not None:
        inference: dict[str, Any] = {"model": "gpt", "config": {}, "max_length": 64}
        inference |= {"generation": {"temperature": 0.8, "top_k": None, "use_ema": evaluated}}
        (tmp_path / "run" / "inference.json").write_text(json.dumps(inference))
    state = train_state(2)
    heads = {True: state["ema"]["mean"]["head"] / 0.5, False: state["params"]["head"]}
    for number, option in enumerate(([], ["--use-ema"], ["--no-use-ema"])):
        averaged = bool(evaluated) if not option else option == ["--use-ema"]
        out = tmp_path / str(number)
        assert main(["ckpt", "export", str(tmp_path / "run"), str(out), *option]) == 0
        assert ("4 tensors (moving average of the parameters), " in capsys.readouterr().out) == averaged
        np.testing.assert_array_equal(load_file(out / "model.safetensors")["head"], heads[averaged])


def test_before_the_first_update_the_parameters_were_evaluated(tmp_path: Path) -> None:
    inference: dict[str, Any] = {"model": "gpt", "config": {}, "max_length": 64}
    inference |= {"generation": {"temperature": 0.8, "top_k": None, "use_ema": True}}
    state = train_state(1)
    state["ema"]["weight"] = jnp.float32(0)
    with Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(1, state, block=True)
        checkpoints.save(2, {"params": state["params"]}, block=True)
        (tmp_path / "run" / "inference.json").write_text(json.dumps(inference))
        for step in (1, 2):
            exported = checkpoints.export(step, tmp_path / str(step), use_ema=None)
            assert not exported.averaged
            weights = load_file(tmp_path / str(step) / "model.safetensors")
            np.testing.assert_array_equal(weights["head"], state["params"]["head"])
        with pytest.raises(CheckpointError, match="has no moving average of the parameters yet"):
            checkpoints.export(1, tmp_path / "out", use_ema=True)


def test_dtypes_of_an_export(saved: Checkpointer, tmp_path: Path) -> None:
    saved.export(2, tmp_path / "out", dtype="bfloat16")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: str(leaf.dtype) for name, leaf in tensors.items()} == {
        "layers.w": "bfloat16", "layers.half": "bfloat16", "head": "bfloat16", "table": "int32",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("state", "use_ema", "message"),
    [
        ({"params": {"__metadata__": 1.0}}, False, "a tensor has the name __metadata__, which is reserved"),
        ({"data": "a text"}, False, "step 1 in .* has no arrays, so it has no model"),
        (
            {"params": {"w": 1.0}, "ema": {"mean": {"w": 1.0, "v": 1.0}, "weight": 1.0}},
            True,
            "contains moving averages for leaves that are not parameters:\n  ema/mean/v$",
        ),
    ],
    ids=["reserved name", "no model", "average of no parameter"],
)
def test_states_without_a_model(tmp_path: Path, state: Any, use_ema: bool, message: str) -> None:
    with Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(1, state, block=True)
        with pytest.raises(CheckpointError, match=message):
            checkpoints.export(1, tmp_path / "out", use_ema=use_ema)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"dtype": "int8"}, "dtype is 'int8'; it must be one of float16, bfloat16, float32"),
        ({"dtype": "f32"}, "dtype is 'f32'; "),
        ({"shard_bytes": 0}, "shard_bytes is 0; it must be an integer of at least 1"),
        ({"shard_bytes": "1GB"}, "shard_bytes is '1GB'; it must"),
    ],
    ids=str,
)
def test_arguments_of_an_export(saved: Checkpointer, tmp_path: Path, argument: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        saved.export(1, tmp_path / "out", **argument)
    assert not (tmp_path / "out").exists()


def test_values_out_of_the_range_of_an_export_s_dtype(tmp_path: Path) -> None:
    """The largest float16 is 65504. Values that are infinite or NaN stay so; finite values must stay finite."""
    with Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(1, {"params": {"a": jnp.ones(2), "b": jnp.float32([-1e5, 2])}}, block=True)
        checkpoints.save(2, {"params": {"a": jnp.float32([jnp.inf, jnp.nan, 65504]), "n": jnp.int32(7)}}, block=True)
        with pytest.raises(CheckpointError, match=r"^b has values of up to 100000, but the largest float16 is 65504"):
            checkpoints.export(1, tmp_path / "out", dtype="float16")
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
        checkpoints.export(1, tmp_path / "wide", dtype="bfloat16")
        checkpoints.export(2, tmp_path / "out", dtype="float16")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    np.testing.assert_array_equal(tensors["a"], np.array([np.inf, np.nan, 65504], np.float16))


def test_the_model_of_another_state_is_the_whole_state(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(0, {"a": {"b": jnp.ones(2)}, "none": jnp.zeros((0, 3)), "rng": jax.random.key(0)}, block=True)
        checkpoints.export(0, tmp_path / "out")
        with pytest.raises(CheckpointError, match="has no moving average of the parameters: leave out use_ema=True"):
            checkpoints.export(0, tmp_path / "ema", use_ema=True)
    assert {name: leaf.shape for name, leaf in load_file(tmp_path / "out" / "model.safetensors").items()} == {
        "a.b": (2,), "none": (0, 3),
    }  # fmt: skip
    assert not (tmp_path / "ema").exists()


def test_a_damaged_model_is_not_exported(saved: Checkpointer, tmp_path: Path) -> None:
    damage(tmp_path / "run" / "step_00000002")
    with pytest.raises(DamagedCheckpointError, match="step 2 in .* is damaged"):
        saved.export(2, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="full exists already: use a new folder"):
        saved.export(1, tmp_path / "full")
    for folder in (".", "/"):
        with pytest.raises(CheckpointError, match="exists already: use a new folder"):
            saved.export(1, folder)


def test_a_copy_equals_the_step(saved: Checkpointer, tmp_path: Path, assert_same: Any) -> None:
    saved.copy(1, tmp_path / "kept")
    with Checkpointer(tmp_path / "kept") as copied:
        assert copied.steps() == [1]
        assert_same(copied.restore(like=train_state(1)), train_state(1))
        assert compare(saved.describe(1), copied.describe(1)).equal
        assert copied.describe().config == {"model": {"name": "gpt", "width": 32}}
    with pytest.raises(CheckpointError, match="kept has step 1 already"):
        saved.copy(1, tmp_path / "kept")
    saved.copy(None, tmp_path / "kept")
    assert Checkpointer(tmp_path / "kept").steps() == [1, 2]


def test_a_copy_includes_the_files_of_the_model(saved: Checkpointer, tmp_path: Path) -> None:
    """The files are copied only if the target has no `inference.json`."""
    names = ("inference.json", "tokenizer.json")
    for name in names:
        (tmp_path / "run" / name).write_text(f"of the run: {name}")
    saved.copy(1, tmp_path / "kept")
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"autoshard.json", "step_00000001", *names}
    for name in names:
        assert (tmp_path / "kept" / name).read_text() == f"of the run: {name}"
    saved.copy(1, tmp_path / "other")
    (tmp_path / "other" / "inference.json").write_text("its own")
    (tmp_path / "other" / "tokenizer.json").unlink()
    saved.copy(2, tmp_path / "other")
    assert (tmp_path / "other" / "inference.json").read_text() == "its own"
    assert not (tmp_path / "other" / "tokenizer.json").exists()


def test_a_damaged_step_is_not_copied(saved: Checkpointer, tmp_path: Path) -> None:
    (tmp_path / "run" / "inference.json").write_text("{}")
    damage(tmp_path / "run" / "step_00000002")
    with pytest.raises(DamagedCheckpointError, match="its copy has different values in "):
        saved.copy(2, tmp_path / "kept")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["autoshard.json"]
    with pytest.raises(CheckpointError, match="is not a checkpoint directory of autoshard"):
        saved.copy(1, tmp_path)


def test_differences_between_two_steps(saved: Checkpointer, tmp_path: Path, mesh8: Mesh) -> None:
    state = train_state(2)
    placed = jax.device_put(state["params"], jax.NamedSharding(mesh8, jax.P()))
    other = state | {"params": placed | {"head": jnp.ones(3), "bias": jnp.ones(2)}}
    del other["opt_state"]
    with Checkpointer(tmp_path / "other") as checkpoints:
        checkpoints.save(2, other, config={"model": {"name": "gpt", "width": 64}}, metrics={"loss": 1.0}, block=True)
        differences = compare(saved.describe(2), checkpoints.describe(2))
    assert not differences.equal and differences.values == ()
    assert differences.same == 9
    assert differences.kinds == ("params/head: float32[64, 32] | float32[3]",)
    assert differences.only_one == ("opt_state/mu",) and differences.only_other == ("params/bias",)
    assert (
        "config.model.width: 32 | 64" in differences.settings and "metrics.loss: nothing | 1.0" in differences.settings
    )
    unchanged = compare(saved.describe(1), saved.describe(2))
    assert len(unchanged.values) == 8 and "different values: 8" in str(unchanged)


def test_a_description(tmp_path: Path, mesh8: Mesh, make_state: Any, config: Any) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(3, make_state(mesh8, 0), config=config, metrics={"loss": 1.5}, plan='{"mesh": {"data": 8}}')
        checkpoints.wait()
        description = checkpoints.describe()
    leaves = {leaf.name: leaf for leaf in description.leaves}
    assert leaves["params/w"].shape == (64, 96) and leaves["params/w"].nbytes == 64 * 96 * 4
    assert leaves["params/w"].layout == "('data', 'model')" and leaves["params/half"].nbytes == 32 * 8 * 2
    assert leaves["typed_many"].dtype == "key<fry>" and leaves["typed_many"].nbytes == 8 * 2 * 4
    assert leaves["params/empty"].digest is None and leaves["params/b"].digest is not None
    assert (
        description.plan == {"mesh": {"data": 8}}
        and description.config == config
        and description.metrics == {"loss": 1.5}
    )
    assert description.meshes == (dict(mesh8.shape),) and description.written_by["devices"] == 8
    assert description.file_bytes > description.nbytes / 2
    text = str(description)
    assert "params/w: float32[64, 96], 24.0 KiB on ('data', 'model')" in text and "metrics   loss 1.5" in text
    assert json.loads(json.dumps(description.to_json()))["step"] == 3
    with pytest.raises(CheckpointError, match="the plan is not JSON"):
        checkpoints.save(4, {"w": jnp.ones(1)}, plan="fsdp:8")
