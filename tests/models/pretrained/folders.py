"""Folders of tiny random models, written without transformers: a config, and the tensors that a table names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from autoshard.ckpt.exchange.safetensors import Tensor, write
from autoshard.models.pretrained.folder import Folder
from autoshard.models.pretrained.load import Described

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10_000.0,
    "dtype": "float32",
}
GPT_OSS: dict[str, Any] = {
    **LLAMA, "architectures": ["GptOssForCausalLM"], "num_hidden_layers": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2, "sliding_window": 8, "head_dim": 8,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {
    **LLAMA, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
LLAMA4: dict[str, Any] = {
    **LLAMA, "architectures": ["Llama4ForCausalLM"], "num_hidden_layers": 4, "intermediate_size_mlp": 24, "head_dim": 8,
    "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "attention_chunk_size": 6,
}  # fmt: skip
GEMMA3: dict[str, Any] = {  # without what the published folders leave out
    "architectures": ["Gemma3ForCausalLM"], "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 6,
    "head_dim": 4, "vocab_size": 24, "sliding_window": 6, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "dtype": "float32",
}  # fmt: skip
GEMMA4: dict[str, Any] = {
    **LLAMA, "architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 6, "num_key_value_heads": 1, "head_dim": 8,
    "global_head_dim": 12, "layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 6,
    "hidden_activation": "gelu_pytorch_tanh", "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 24, "tie_word_embeddings": True,
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    **LLAMA, "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 2, "num_key_value_heads": 4,
    "first_k_dense_replace": 1, "moe_intermediate_size": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4, "v_head_dim": 4, "num_nextn_predict_layers": 1,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"], "vocab_size": 24, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "dtype": "float32",
}  # fmt: skip
VIT: dict[str, Any] = {
    "architectures": ["ViTForImageClassification"], "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "image_size": 8, "patch_size": 4, "hidden_act": "gelu", "num_labels": 3,
    "dtype": "float32",
}  # fmt: skip
QWEN2_5_VL: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    "head_dim": 8,
    "image_token_id": 20,
    "vision_config": {
        "depth": 3, "hidden_size": 16, "out_hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4,
        "window_size": 16, "fullatt_block_indexes": [1], "hidden_act": "silu",
    },
}  # fmt: skip


def tensors_of(folder: Path, dtype: str) -> dict[str, np.ndarray]:
    """Returns random tensors for the config of a folder."""
    rng = np.random.default_rng(0)
    sources = Described.of(Folder.open(folder), None, {}).sources.values()
    shapes = {name: source.tensor_shape for source in sources for name in source.names.values()}
    return {name: (0.2 * rng.normal(size=shape)).astype(dtype) for name, shape in shapes.items()}


def write_tensors(folder: Path, tensors: dict[str, np.ndarray], shard_bytes: int = 10**9) -> None:
    """Writes tensors into a folder."""
    found = [Tensor(name, x.shape, str(x.dtype), lambda x=x: x) for name, x in tensors.items()]
    write(folder, found, shard_bytes=shard_bytes, metadata={"format": "pt"})


def add_predicting_layer(folder: Path, layer: int) -> set[str]:
    """Adds tensors of the layer of DeepSeek-V3 that predicts one more token, and returns their names."""
    rng, start = np.random.default_rng(1), f"model.layers.{layer}."
    new = {start + "eh_proj.weight": rng.normal(size=(16, 32)), start + "enorm.weight": rng.normal(size=(16,))}
    found = {one.name: one.read() for one in Folder.open(folder).stored_tensors().values()}
    new = {name: x.astype(found["model.norm.weight"].dtype) for name, x in new.items()}
    experts = ".mlp.experts.0.up_proj.weight"  # with its scales, in a folder in fp8
    new |= {
        start + name.partition(f".{layer - 1}.")[2]: x
        for name, x in found.items()
        if name.startswith(f"model.layers.{layer - 1}{experts}")
    }
    write_tensors(folder, {**found, **new})
    return set(new)


def make_folder(folder: Path, config: dict[str, Any], *, dtype: str = "float32", shard_bytes: int = 10**9) -> Path:
    """Makes a folder with a config and random tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_tensors(folder, tensors_of(folder, dtype), shard_bytes)
    return folder
