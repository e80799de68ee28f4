"""Tensors that the model does not use: they are named, not loaded, and written back as they were."""

import json

import pytest

from autoshard.errors import AutoshardError, AutoshardWarning
from autoshard.models.pretrained import load_pretrained, save_pretrained
from tests.models.pretrained.folders import DEEPSEEK_V3, LLAMA, add_predicting_layer, make_folder
from tests.models.pretrained.quantized.folders import FP8, make_quantized_folder
from tests.models.pretrained.quantized.test_schemes import same, stored

FP8_DEEPSEEK = {**DEEPSEEK_V3, "dtype": "bfloat16", "quantization_config": FP8}


def loaded(folder):
    """Loads a folder, which warns."""
    with pytest.warns(AutoshardWarning, match=r"layer 2, which predicts .* such as model.layers.2.eh_proj.weight"):
        return load_pretrained(folder, plan="fsdp:8", batch=(8, 16))


@pytest.mark.few(1)
@pytest.mark.parametrize("config", [DEEPSEEK_V3, FP8_DEEPSEEK], ids=["plain", "fp8"])
def test_import_then_export_is_the_same_bytes(tmp_path, config):
    make = make_quantized_folder if config is FP8_DEEPSEEK else make_folder
    folder = make(tmp_path / "in", config)
    copied = add_predicting_layer(folder, 2)
    save_pretrained(loaded(folder), tmp_path / "out")
    assert same(stored(folder), stored(tmp_path / "out")) and copied <= stored(folder).keys()
    assert json.loads((tmp_path / "out/config.json").read_text()) == config


def test_a_dtype_applies_to_copies_too(tmp_path):
    folder = make_folder(tmp_path / "in", DEEPSEEK_V3)
    copied = add_predicting_layer(folder, 2)
    save_pretrained(loaded(folder), tmp_path / "out", dtype="bfloat16")
    before, after = stored(folder), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(after[name].tobytes() == before[name].astype("bfloat16").tobytes() for name in copied)


def test_without_the_folder_copies_must_be_left_out(tmp_path):
    folder = make_folder(tmp_path / "in", DEEPSEEK_V3)
    copied = add_predicting_layer(folder, 2)
    model = loaded(folder)
    before = stored(folder)
    folder.rename(tmp_path / "other")
    with pytest.raises(AutoshardError, match="Put the folder back, or leave them out by copies=False"):
        save_pretrained(model, tmp_path / "out")
    make_folder(folder, DEEPSEEK_V3)  # another folder, without that layer
    with pytest.raises(AutoshardError, match=r"no tensors whose names match .*layers.*2"):
        save_pretrained(model, tmp_path / "out")
    save_pretrained(model, tmp_path / "out", copies=False)
    assert stored(tmp_path / "out").keys() == before.keys() - copied


def test_only_the_layers_of_the_config_are_copied(tmp_path):
    folder = make_folder(tmp_path / "in", DEEPSEEK_V3)
    add_predicting_layer(folder, 3)
    with pytest.raises(AutoshardError, match=r"model.layers.3.eh_proj.weight: the model has no such tensor"):
        load_pretrained(folder, plan="dp:8", batch=(8, 16))
    other = make_folder(tmp_path / "llama", LLAMA)
    add_predicting_layer(other, 3)
    with pytest.raises(AutoshardError, match=r"model.layers.3.eh_proj.weight: the model has no such tensor"):
        load_pretrained(other, plan="dp:8", batch=(8, 16))
