"""Quantized folders: read onto shards, written back bit for bit, and refused where they are damaged."""

import json

import numpy as np
import pytest
from flax import nnx

from autoshard.ckpt.exchange import safetensors
from autoshard.errors import AutoshardError
from autoshard.models.pretrained import load_pretrained, plan_pretrained, save_pretrained
from autoshard.models.pretrained.folder import Folder
from tests.models.pretrained.folders import write_tensors
from tests.models.pretrained.quantized.folders import (
    FP8_LLAMA,
    MXFP4_GPT_OSS,
    make_quantized_folder,
    quantized_tensors,
)

CONFIGS = {"fp8": (FP8_LLAMA, "fsdp:4 tp:2"), "mxfp4": (MXFP4_GPT_OSS, "ep:4 fsdp:2")}
BATCH = (8, 16)
FP8_NAME = "model.layers.1.mlp.up_proj.weight"
MXFP4_NAME = "model.layers.1.mlp.experts.down_proj"


def stored(folder):
    return {one.name: one.read() for one in safetensors.read(folder)}


def same(a, b):
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and a[n].tobytes() == b[n].tobytes() for n in a)


@pytest.fixture(params=CONFIGS)
def quantized(request, tmp_path):
    config, plan = CONFIGS[request.param]
    return make_quantized_folder(tmp_path / "in", config), plan


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_import_then_export_is_the_same_bytes(quantized, tmp_path, dtype):
    folder, plan = quantized
    model = load_pretrained(folder, plan=plan, batch=BATCH, dtype=dtype)
    assert {str(leaf.dtype) for leaf in nnx.to_flat_state(nnx.state(model)).leaves} == {dtype or "bfloat16"}
    save_pretrained(model, tmp_path / "out", shard_bytes=10**9)
    before, after = stored(folder), stored(tmp_path / "out")
    if dtype is None:
        assert same(before, after)
        assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads(
            (folder / "config.json").read_text()
        )
    else:  # other tensors have the model's dtype
        coded = {name for name, x in before.items() if x.dtype != "bfloat16"}
        assert coded and same({n: before[n] for n in coded}, {n: after[n] for n in coded})


def test_a_changed_value_changes_its_block_alone(tmp_path):
    folder = make_quantized_folder(tmp_path / "in", FP8_LLAMA)
    model = load_pretrained(folder, plan="dp:8", batch=BATCH)
    weight = model.segments[0].layers[0].mlp.w_up
    weight[...] = weight[...].at[1, 3, 13].set(2.0)
    save_pretrained(model, tmp_path / "out")
    before, after = stored(folder), stored(tmp_path / "out")
    differ = {name: np.argwhere(before[name].view("u1") != after[name].view("u1")) for name in before}
    assert {name for name, where in differ.items() if len(where)} == {FP8_NAME, FP8_NAME + "_scale_inv"}
    assert {(row // 12, column // 10) for row, column in differ[FP8_NAME].tolist()} == {(1, 0)}


def test_a_dtype_writes_plain_tensors(quantized, tmp_path):
    folder, plan = quantized
    save_pretrained(load_pretrained(folder, plan=plan, batch=BATCH), tmp_path / "out", dtype="bfloat16")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    read = Folder.open(folder).tensors()
    after = stored(tmp_path / "out")
    assert after.keys() == read.keys()
    assert all(after[name].tobytes() == one.read().astype("bfloat16").tobytes() for name, one in read.items())


def test_without_its_folder_a_model_is_not_quantized_again(tmp_path):
    folder = make_quantized_folder(tmp_path / "in", FP8_LLAMA)
    model = load_pretrained(folder, plan="dp:8", batch=BATCH)
    folder.rename(tmp_path / "other")
    with pytest.raises(AutoshardError, match="Put the folder back, or give a dtype"):
        save_pretrained(model, tmp_path / "out")
    save_pretrained(model, tmp_path / "out", dtype="bfloat16")


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (
            FP8_LLAMA,
            lambda t: t.pop(FP8_NAME + "_scale_inv"),
            f"{FP8_NAME} in model.safetensors: its scales .*are missing",
        ),
        (
            FP8_LLAMA,
            lambda t: t.update({FP8_NAME + "_scale_inv": np.ones((3, 3), np.float32)}),
            r"are float32\[3, 3\]; codes of shape \[32, 16\] need float32\[3, 2\]",
        ),
        (
            FP8_LLAMA,
            lambda t: t.update({FP8_NAME: t[FP8_NAME].astype("bfloat16")}),
            f"{FP8_NAME}_scale_inv in model.safetensors: there are no codes {FP8_NAME} of float8_e4m3fn",
        ),
        (MXFP4_GPT_OSS, lambda t: t.pop(MXFP4_NAME + "_scales"), f"{MXFP4_NAME}_blocks in .*are missing"),
        (
            MXFP4_GPT_OSS,
            lambda t: t.update({MXFP4_NAME + "_blocks": t[MXFP4_NAME + "_blocks"][..., :8]}),
            r"codes of shape \[4, 64, 1, 8\] have no blocks",
        ),
        (
            MXFP4_GPT_OSS,
            lambda t: t.update({MXFP4_NAME + "_scales": t[MXFP4_NAME + "_scales"][:, :3]}),
            r"uint8\[4, 3, 1\]; codes of shape \[4, 64, 1, 16\] need uint8\[4, 64, 1\]",
        ),
        (MXFP4_GPT_OSS, lambda t: t.pop(MXFP4_NAME + "_blocks"), "there are no codes"),
    ],
)
def test_damaged_folders_name_the_tensor_and_the_file(tmp_path, config, change, message):
    folder = make_quantized_folder(tmp_path / "in", config)
    tensors = quantized_tensors(folder, config)
    change(tensors)
    write_tensors(folder, tensors)
    with pytest.raises(AutoshardError, match=message):
        load_pretrained(folder, plan="dp:8", batch=BATCH)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "awq"}, "quant_method is 'awq'; built are fp8, mxfp4"),
        ({"activation_scheme": "static"}, "activation_scheme is 'static'"),
        ({"weight_block_size": None}, "weight_block_size is None; it must be two whole numbers"),
        ({"scale_fmt": "other"}, "scale_fmt is 'other'"),
    ],
)
def test_schemes_that_are_not_built(tmp_path, change, message):
    folder = make_quantized_folder(tmp_path / "in", FP8_LLAMA)
    config = {**FP8_LLAMA, "quantization_config": {**FP8_LLAMA["quantization_config"], **change}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(AutoshardError, match=message):
        load_pretrained(folder, plan="dp:8", batch=BATCH)
    plan_pretrained(folder, batch=BATCH, plan="dp:8")  # planning reads no tensors
