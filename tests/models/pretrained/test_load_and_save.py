"""Loading onto shards and writing back: the same bytes from any mesh, and no more read than a shard needs."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from autoshard.ckpt.exchange.file_tensors import FileTensor
from autoshard.errors import AutoshardError, AutoshardWarning
from autoshard.models.decoder import Decoder
from autoshard.models.pretrained import known_families, load_pretrained, plan_pretrained, save_pretrained
from tests.models.pretrained.folders import (
    GEMMA3,
    GEMMA4,
    GPT2,
    GPT_OSS,
    LLAMA,
    LLAMA4,
    MIXTRAL,
    QWEN2_5_VL,
    VIT,
    make_folder,
    tensors_of,
    write_tensors,
)
from tests.models.small import called

BATCH = (8, 16)


def stored(folder):
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def same(a, b):
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and a[n].tobytes() == b[n].tobytes() for n in a)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "config, plan, scan",
    [
        (LLAMA, "dp:8", True),
        (LLAMA, "fsdp:4 tp:2", True),
        (LLAMA, "fsdp:8", False),
        (GPT_OSS, "ep:4 fsdp:2", True),
        (MIXTRAL, "ep:2 tp:2 dp:2", True),
        (GPT2, "tp:2 fsdp:4", True),
        (VIT, "fsdp:8", True),
        (VIT, "fsdp:8", False),
        (QWEN2_5_VL, "fsdp:8", True),
        (LLAMA4, "ep:4 fsdp:2", True),
        (GEMMA4, "fsdp:8", True),
    ],
    ids=[
        "replicated",
        "sharded",
        "separate-layers",
        "gpt-oss",
        "mixtral",
        "gpt2",
        "vit",
        "vit-separate",
        "qwen2.5-vl",
        "llama4",
        "gemma4",
    ],
)
def test_import_then_export_is_the_same_bytes(tmp_path, config, plan, scan):
    folder = make_folder(tmp_path / "in", config)
    model = load_pretrained(folder, plan=plan, batch=BATCH, scan_layers=scan)
    save_pretrained(model, tmp_path / "out", shard_bytes=10_000)
    assert same(stored(folder), stored(tmp_path / "out"))
    assert json.loads((tmp_path / "out/config.json").read_text()) == config
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(stored(folder))


def test_gpt2_is_read_and_written_with_and_without_its_prefix(tmp_path):
    folder = make_folder(tmp_path / "in", GPT2)
    bare = {name.removeprefix("transformer."): x for name, x in tensors_of(folder, "float32").items()}
    (folder / "model.safetensors").unlink()
    masks = {"h.0.attn.bias": np.ones((1, 1, 32, 32), "float32"), "h.1.attn.masked_bias": np.zeros((1,), "float32")}
    write_tensors(folder, {**bare, **masks})
    model = load_pretrained(folder, plan="fsdp:8", batch=BATCH)
    assert model.segments[0].layers[0].attention.wq.shape == (2, 16, 2, 8)
    save_pretrained(model, tmp_path / "out")
    assert same(stored(tmp_path / "out"), bare)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "config, whole, start, tower",
    [
        (LLAMA4, "Llama4ForConditionalGeneration", "language_model.", "vision_model.layernorm_pre.weight"),
        (GEMMA4, "Gemma4ForConditionalGeneration", "model.language_model.", "model.vision_tower.std_scale"),
        (GEMMA3, "Gemma3ForConditionalGeneration", "language_model.", "vision_tower.vision_model.embeddings.weight"),
        (GEMMA3, "Gemma3ForConditionalGeneration", "model.language_model.", "model.multi_modal_projector.norm.weight"),
    ],
    ids=["llama4", "gemma4", "gemma3-published", "gemma3"],
)
def test_the_text_model_of_a_model_with_towers_is_read_and_written_alone(tmp_path, config, whole, start, tower):
    text = stored(make_folder(tmp_path / "text", config))
    names = {name: start + (name.removeprefix("model.") if start.startswith("model.") else name) for name in text}
    folder = tmp_path / "whole"
    folder.mkdir()
    inner = {key: value for key, value in config.items() if key not in ("architectures", "dtype")}
    nested = {"architectures": [whole], "dtype": "float32", "text_config": inner, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(nested))
    write_tensors(folder, {names[name]: x for name, x in text.items()} | {tower: np.zeros(2, "float32")})
    with pytest.warns(AutoshardWarning, match=f"is a {whole}: its text model alone is read") as warned:
        model = load_pretrained(folder, plan="fsdp:8", batch=BATCH)
    assert warned[0].filename == __file__
    save_pretrained(model, tmp_path / "out")
    assert same(text, stored(tmp_path / "out"))
    assert json.loads((tmp_path / "out/config.json").read_text()) == config


@pytest.mark.slow
def test_unused_keys_and_values_of_a_layer_that_borrows_are_left_out(tmp_path):
    folder = make_folder(tmp_path / "in", GEMMA4)
    tensors = tensors_of(folder, "float32")
    (folder / "model.safetensors").unlink()
    write_tensors(folder, tensors | {"model.layers.5.self_attn.k_proj.weight": np.zeros((12, 16), "float32")})
    save_pretrained(load_pretrained(folder, plan="fsdp:8", batch=BATCH), tmp_path / "out")
    assert same(tensors, stored(tmp_path / "out"))


def test_values_do_not_depend_on_the_plan(tmp_path):
    folder = make_folder(tmp_path, LLAMA)
    tokens = jnp.arange(32).reshape(2, 16) % 24
    logits = [
        np.asarray(called(load_pretrained(folder, plan=plan, batch=BATCH, scan_layers=scan), Decoder.__call__, tokens))
        for plan, scan in (("dp:8", True), ("tp:2 fsdp:4", False))
    ]
    assert np.abs(logits[0] - logits[1]).max() < 1e-5


def test_bfloat16_stays_unless_a_dtype_is_given(tmp_path):
    folder = make_folder(tmp_path, {**LLAMA, "dtype": "bfloat16"}, dtype="bfloat16")
    model = load_pretrained(folder, plan="dp:8", batch=BATCH)
    assert model.embed[...].dtype == jnp.bfloat16 and model(jnp.zeros((1, 4), jnp.int32)).dtype == jnp.bfloat16
    wide = load_pretrained(folder, plan="dp:8", batch=BATCH, dtype="float32", compute_dtype="bfloat16")
    assert wide.embed[...].dtype == jnp.float32 and wide(jnp.zeros((1, 4), jnp.int32)).dtype == jnp.bfloat16


def test_a_dtype_that_does_not_hold_the_values_is_refused(tmp_path):
    model = load_pretrained(make_folder(tmp_path / "in", LLAMA), plan="dp:8", batch=BATCH)
    with pytest.raises(AutoshardError, match="dtype is 'int8'; choose one of float32"):
        save_pretrained(model, tmp_path / "out", dtype="int8")
    model.embed[...] = model.embed[...].at[3, 5].set(1e5)
    with pytest.raises(AutoshardError, match="embed has values of up to 100000, but the largest float16 is 65504"):
        save_pretrained(model, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


def test_a_shard_reads_its_own_part_of_a_tensor_alone(tmp_path, monkeypatch):
    folder = make_folder(tmp_path, LLAMA)
    read = []
    original = FileTensor.read

    def counted(tensor, index=(), empty=np.empty):
        found = original(tensor, index, empty)
        read.append(found.nbytes)
        return found

    monkeypatch.setattr(FileTensor, "read", counted)
    model = load_pretrained(folder, plan="fsdp:8", batch=BATCH)
    total = sum(x.nbytes for x in stored(folder).values())
    assert sum(read) <= 1.05 * total  # each byte once, but for tensors that no device shards
    largest = max(x.nbytes for x in stored(folder).values())
    assert max(read) <= largest / 4
    assert len(model.embed[...].sharding.device_set) == 8


def test_plan_needs_the_config_alone(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    plan = plan_pretrained(tmp_path, batch=BATCH, plan="fsdp:4 tp:2", remat="full")
    assert plan.chosen == "fsdp:4 tp:2"
    with pytest.raises(AutoshardError, match="has no safetensors files, so it has no weights"):
        load_pretrained(tmp_path)


def test_a_plan_serves_the_load(tmp_path):
    folder = make_folder(tmp_path, LLAMA)
    plan = plan_pretrained(folder, batch=BATCH, plan="fsdp:4 tp:2")
    model = load_pretrained(folder, plan=plan)
    wq = nnx.state(model)["segments"][0]["layers"][0]["attention"]["wq"][...]
    assert wq.sharding.spec == plan.in_specs[0]["segments"][0]["layers"][0]["attention"]["wq"]


def test_a_plan_of_another_model_is_refused(tmp_path):
    folder = make_folder(tmp_path, LLAMA)
    plan = plan_pretrained(folder, batch=BATCH, plan="fsdp:4 tp:2")
    with pytest.raises(AutoshardError, match="plan is one of another model: segments/0/0/layers.* is missing in"):
        load_pretrained(folder, plan=plan, scan_layers=False)
    wide = plan_pretrained(make_folder(tmp_path / "wide", {**LLAMA, "vocab_size": 32}), batch=BATCH, plan="fsdp:4 tp:2")
    with pytest.raises(AutoshardError, match=r"embed is \[32, 16\] in the plan and \[24, 16\] in this model"):
        load_pretrained(folder, plan=wide)


def test_a_trained_model_is_written(tmp_path):
    folder = make_folder(tmp_path / "in", LLAMA)
    model = load_pretrained(folder, plan="fsdp:8", batch=BATCH)
    model.norm.scale[...] = model.norm.scale[...] + 1
    save_pretrained(model, tmp_path / "out", dtype="bfloat16")
    before, after = stored(folder), stored(tmp_path / "out")
    assert np.array_equal(after["model.norm.weight"], (before["model.norm.weight"] + 1).astype(jnp.bfloat16))
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"


def test_a_folder_that_is_not_empty_is_not_written_over(tmp_path):
    folder = make_folder(tmp_path, LLAMA)
    model = load_pretrained(folder, plan="dp:8", batch=BATCH)
    with pytest.raises(AutoshardError, match="exists already"):
        save_pretrained(model, folder)


def test_a_family_of_ones_own_is_an_entry_point(tmp_path, monkeypatch):
    import dataclasses

    from autoshard.models.pretrained import families as room

    own = dataclasses.replace(known_families()["LlamaForCausalLM"], name="own", architectures=("OwnForCausalLM",))

    class Entry:
        name, value = "own", "own_package:FAMILY"

        def load(self):
            return own

    monkeypatch.setattr(room, "entry_points", lambda group: [Entry()] if group == "autoshard.families" else [])
    room.known_families.cache_clear()
    try:
        folder = make_folder(tmp_path, {**LLAMA, "architectures": ["OwnForCausalLM"]})
        assert load_pretrained(folder, plan="dp:8", batch=BATCH).cfg.layers == 3
    finally:
        monkeypatch.undo()
        room.known_families.cache_clear()


@pytest.fixture(autouse=True)
def eight_devices():
    assert len(jax.devices()) == 8
