"""Folders that are damaged, incomplete or unknown: an error that names the tensor and the file, and nothing loaded."""

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.ckpt.exchange.safetensors import Tensor, write
from autoshard.errors import AutoshardError
from autoshard.models.pretrained import load_pretrained, plan_pretrained
from autoshard.models.pretrained.folder import Folder, float_dtype, read_table
from autoshard.models.pretrained.workload import folder_workload
from autoshard.serve.generator import stop_tokens
from tests.models.pretrained.folders import (
    DEEPSEEK_V3,
    GEMMA4,
    LLAMA,
    LLAMA4,
    MIXTRAL,
    make_folder,
    tensors_of,
    write_tensors,
)


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "model", LLAMA)


def with_config(folder, **changes):
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))


def with_tensors(folder, change):
    tensors = tensors_of(folder, "float32")
    change(tensors)
    write_tensors(folder, tensors)


def refusal(folder):
    with pytest.raises(AutoshardError) as caught:
        load_pretrained(folder, plan="dp:8", batch=(8, 16))
    return str(caught.value)


def test_missing_tensor(folder):
    with_tensors(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    assert "model.layers.1.mlp.up_proj.weight: the folder has no such tensor" in refusal(folder)


def test_unexpected_tensor(folder):
    with_tensors(folder, lambda t: t.update({"model.layers.7.mlp.up_proj.weight": np.zeros((2, 2), np.float32)}))
    assert "model.layers.7.mlp.up_proj.weight: the model has no such tensor" in refusal(folder)


def test_wrong_shape(folder):
    with_tensors(folder, lambda t: t.update({"model.norm.weight": np.zeros(3, np.float32)}))
    assert "model.norm.weight: the folder has [3], the model [16]" in refusal(folder)


def test_dtypes_that_differ_within_a_parameter(folder):
    name = "model.layers.1.mlp.up_proj.weight"
    with_tensors(folder, lambda t: t.update({name: t[name].astype("bfloat16")}))
    assert "tensors of bfloat16 and float32: give a dtype for all" in refusal(folder)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_tensors_that_are_not_decoded(folder, dtype):
    name = "model.layers.1.mlp.up_proj.weight"
    with_tensors(folder, lambda t: t.update({name: t[name].astype(dtype)}))
    assert f"{name}: the folder has {dtype}, which a model does not compute with" in refusal(folder)


def test_files_without_an_index(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    assert "neither model.safetensors nor model.safetensors.index.json" in refusal(folder)


def test_a_model_in_one_file_beside_an_index_of_others(folder):
    """transformers reads the one file, others the index."""
    content = (folder / "model.safetensors").read_bytes()
    (folder / "a.safetensors").write_bytes(content)
    places = dict.fromkeys(Folder.open(folder).tensors(), "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert "has both model.safetensors and model.safetensors.index.json" in refusal(folder)


def test_of_a_tensor_in_two_files_the_index_chooses(folder):
    new = Folder.open(folder).tensors()
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    old = Tensor("model.norm.weight", (16,), "float32", lambda: np.zeros(16, "float32"))
    write(folder, [old, replace(old, name="lm_head.weight", shape=(24, 16), read=lambda: np.ones((24, 16), "float32"))],
        shard_bytes=10**9, metadata={})  # fmt: skip
    (folder / "model.safetensors").rename(folder / "b.safetensors")
    places = {name: "b.safetensors" if name == "lm_head.weight" else "a.safetensors" for name in new}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    read = Folder.open(folder).tensors()
    assert read.keys() == new.keys()
    assert read["model.norm.weight"].read().any() and (read["lm_head.weight"].read() == 1).all()


def test_a_head_that_is_not_the_embedding_it_is_tied_to(folder):
    with_config(folder, tie_word_embeddings=True)
    assert "lm_head.weight in " in (message := refusal(folder)) and "is not model.embed_tokens.weight" in message
    assert "damaged" not in message
    with_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    load_pretrained(folder, plan="dp:8", batch=(8, 16))


def test_truncated_file(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "damaged or truncated" in refusal(folder) and "model" in refusal(folder)


def test_an_error_that_says_what_happened_passes_unchanged(folder):
    with pytest.raises(AutoshardError, match="^layer 3 has no scale$"), Folder.open(folder).reading("a tensor"):
        raise AutoshardError("layer 3 has no scale")


def test_missing_shard(folder):
    (folder / "model.safetensors").unlink()
    write_tensors(folder, tensors_of(folder, "float32"), 10_000)
    name = sorted(folder.glob("model-*.safetensors"))[1].name
    (folder / name).unlink()
    assert f"{name} is missing" in refusal(folder)


def test_pickled_files_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin: such files can execute code" in refusal(folder)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"architectures": ["LlamaForCausalML"]}, "'LlamaForCausalML' is not known. Near ones: LlamaForCausalLM"),
        ({"architectures": []}, "names no architectures; the known ones are DeepseekV2ForCausalLM"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; the activations that are built are silu"),
        ({"hidden_size": "16"}, "hidden_size is '16'; it must be a finite number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a whole number of at least 1"),
        ({"num_hidden_layers": 10**9}, "config.json: num_hidden_layers is 1000000000; it must be at most 8192"),
        ({"vocab_size": 10**400}, "vocab_size is 1000"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "of type 'longrope' are not built"),
        ({"num_key_value_heads": 3}, "heads 4 is not a multiple of kv_heads 3"),
        ({"pretraining_tp": 2}, "pretraining_tp is 2; only 1 is built"),
        ({"vocab_size": None}, "vocab_size is None; it must be a finite number"),
    ],
)
def test_configs(folder, changes, message):
    with_config(folder, **changes)
    assert message in refusal(folder)


@pytest.mark.parametrize(
    "config, changes, message",
    [
        (LLAMA4, {"num_experts_per_tok": 2}, "num_experts_per_tok is 2; only 1 is built"),
        (LLAMA4, {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries; it must have one for each of 4 layers"),
        (LLAMA4, {"moe_layers": "all"}, "moe_layers is 'all'; it must be a list of whole numbers"),
        (LLAMA4, {"layer_types": ["sliding_attention"] * 4}, "layer_types must be one of chunked_attention, full_att"),
        (
            LLAMA4,
            {"layer_types": ["chunked_attention"] * 4, "attention_chunk_size": None},
            "attention_chunk_size is nul",
        ),
        (MIXTRAL, {"hidden_act": "gelu"}, "activation is 'gelu'; experts are built with silu only"),
        (DEEPSEEK_V3, {"hidden_act": "gelu_new"}, "activation is 'gelu_tanh'; experts are built with silu only"),
        (GEMMA4, {"enable_moe_block": True}, "enable_moe_block is True; only False is built"),
        (GEMMA4, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        (GEMMA4, {"num_kv_shared_layers": 6}, "num_kv_shared_layers is 6; it must be below 6, the number of l"),
        (GEMMA4, {"num_kv_shared_layers": 1.5}, "num_kv_shared_layers is 1.5; it must be a whole number of at least 0"),
        (GEMMA4, {"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input is -1; it must be a whole number"),
        (GEMMA4, {"final_logit_softcapping": 0}, "final_logit_softcapping is 0; it must be above 0"),
        (GEMMA4, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0; it must be above 0"),
        (GEMMA4, {"hidden_activation": []}, "hidden_activation is []; the activations that are built are silu"),
        (GEMMA4, {"rope_parameters": {"full_attention": 1}}, "full_attention is 1; it must be a table"),
        (LLAMA4, {"num_local_experts": 10**9}, "num_local_experts is 1000000000; it must be at most 8192"),
        (DEEPSEEK_V3, {"n_routed_experts": 10**9}, "n_routed_experts is 1000000000; it must be at most 8192"),
        (LLAMA4, {"moe_layers": [4]}, "moe_layers is [4]; it must be numbers of layers, below 4"),
        (LLAMA4, {"attn_temperature_tuning": "no"}, "attn_temperature_tuning is 'no'; it must be true or false"),
        (LLAMA4, {"rope_scaling": "llama3"}, "rope_scaling is 'llama3'; it must be a table"),
        (LLAMA4, {"rope_theta": "1e4"}, "rope_theta is '1e4'; it must be a finite number"),
        (LLAMA4, {"attn_scale": float("nan")}, "attn_scale is nan; it must be a finite number"),
        (
            GEMMA4,
            {"num_kv_shared_layers": 5},
            "num_kv_shared_layers is 5: no layer before the last 5 has full_attention",
        ),
        (GEMMA4, {"per_layer_config": {"1": {"ffn": 2}}}, "per_layer_config of layer 1 is {'ffn': 2}"),
        (
            LLAMA,
            {"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5",
        ),
    ],
)
def test_configs_of_later_families(tmp_path, config, changes, message):
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    for read in (plan_pretrained, folder_workload):
        with pytest.raises(AutoshardError) as caught:
            read(tmp_path)
        assert message in str(caught.value)


def test_a_model_with_towers_and_no_config_of_its_text_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Gemma4ForConditionalGeneration"]}))
    with pytest.raises(AutoshardError, match=r"config\.json: text_config is None; it must be a table"):
        plan_pretrained(tmp_path)


def test_no_folder_and_no_config(tmp_path):
    assert "is not a folder" in refusal(tmp_path / "nothing")
    assert "has no config.json" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[1")
    assert "config.json cannot be read" in refusal(tmp_path)


@pytest.mark.parametrize(
    "content, message",
    [("[1]", "it must be a table, not list"), ("{", "cannot be read"), ("[" * 10**5, "cannot be read")],
)
def test_a_json_file_that_is_no_table(tmp_path, content, message):
    file = tmp_path / "generation_config.json"
    file.write_text(content)
    with pytest.raises(AutoshardError, match=message) as caught:
        read_table(file)
    assert str(file) in str(caught.value)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(AutoshardError, match=message):
        stop_tokens(Folder.open(tmp_path))


def test_a_damaged_file_is_named(folder):
    (folder / "model.safetensors").write_bytes(b"\x10")
    assert "cannot be read: model.safetensors: " in refusal(folder)


def test_a_pointer_of_git_lfs_is_named(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert "model.safetensors is a pointer of Git LFS, not the file: run `git lfs pull`" in refusal(folder)


def test_the_name_of_a_model_of_the_hub():
    assert "run `hf download meta-llama/Llama-3.1-8B --local-dir FOLDER`" in refusal("meta-llama/Llama-3.1-8B")


@pytest.mark.parametrize("dtype", ["bf16", np.int8, object()])
def test_dtypes_that_parameters_do_not_have(folder, dtype):
    for function in (load_pretrained, plan_pretrained):
        with pytest.raises(AutoshardError, match=f"^{function.__name__}: dtype is .*; choose one of float32, bfloat16"):
            function(folder, dtype=dtype)


@pytest.mark.parametrize("batch", [8, (8,), (8, 16, 2), "8x", (0, 16), (8, 16.5), {8, 16, 2}])
def test_batches_that_are_not_rows_and_positions(folder, batch):
    for function in (load_pretrained, plan_pretrained):
        with pytest.raises(AutoshardError, match=f"^{function.__name__}: batch is .* rows and positions, such as"):
            function(folder, batch=batch)


def test_dtypes_of_jax_have_names():
    assert [float_dtype(one, "f") for one in (None, jnp.bfloat16, np.dtype("float16"), "float32")] == [
        None, "bfloat16", "float16", "float32",
    ]  # fmt: skip
