"""Tiny configs of the pretrained families, each with the features that its family adds.

`CONFIGS` maps a name to the name of a config class of transformers and its arguments.
"""

from __future__ import annotations

from typing import Any

VOCAB = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,  # larger than usual: with tiny layers, errors would not show otherwise
    "pad_token_id": None,  # PyTorch gives a padding token's embedding no gradient
}
LONGER = {"original_max_position_embeddings": 128, "rope_theta": 10_000.0}
LATENT: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 2.0,
}
LLAMA4: dict[str, Any] = {
    "intermediate_size": 24,
    "intermediate_size_mlp": 48,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 100,
    "floor_scale": 60,
}
GEMMA4: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": 70,
    "final_logit_softcapping": 3.0,
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("LlamaConfig", SIZES),
    "llama3": (
        "LlamaConfig",
        {
            **SIZES,
            "tie_word_embeddings": True,
            "head_dim": 16,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                **LONGER, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            },
        },
    ),
    "llama-linear": (
        "LlamaConfig",
        {**SIZES, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "mistral": ("MistralConfig", {**SIZES, "sliding_window": 100}),
    "qwen2": ("Qwen2Config", {**SIZES, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {**SIZES, "head_dim": 16}),
    "qwen3-yarn": (
        "Qwen3Config",
        {**SIZES, "head_dim": 16, "rope_parameters": {**LONGER, "rope_type": "yarn", "factor": 4.0}},
    ),
    "gemma2": (
        "Gemma2Config",
        {
            **SIZES, "num_hidden_layers": 5, "head_dim": 16, "sliding_window": 100, "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **SIZES, "num_hidden_layers": 8, "head_dim": 16, "sliding_window": 70, "query_pre_attn_scalar": 20,
            "layer_types": [*[*["sliding_attention"] * 2, "full_attention"] * 2, *["sliding_attention"] * 2],
        },
    ),
    "mixtral": ("MixtralConfig", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 90}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            **SIZES, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
            "norm_topk_prob": True, "mlp_only_layers": [0],
        },
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            **SIZES, "num_hidden_layers": 4, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
            "sliding_window": 40,
        },
    ),
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": VOCAB, "n_positions": 600, "n_embd": 32, "n_layer": 3, "n_head": 4, "initializer_range": 0.1,
            "bos_token_id": None, "eos_token_id": None,
        },
    ),
    "deepseek-v2": (
        "DeepseekV2Config",
        {
            **LATENT, "q_lora_rank": 24, "n_shared_experts": 2, "topk_method": "group_limited_greedy", "n_group": 2,
            "topk_group": 1,
        },
    ),
    "deepseek-v2-lite": (
        "DeepseekV2Config",
        {
            **LATENT, "q_lora_rank": None, "v_head_dim": 24, "n_shared_experts": 2, "topk_method": "greedy",
            "rope_parameters": {**LONGER, "rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        {
            **LATENT, "q_lora_rank": 24, "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3,
            "num_mtp_layers": 0,
            "rope_parameters": {**LONGER, "rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            **SIZES, **LLAMA4, "num_hidden_layers": 8, "interleave_moe_layer_step": 2,
            "rope_parameters": {
                **LONGER, "rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
            },
        },
    ),
    "llama4-lists": (
        "Llama4TextConfig",
        {
            **SIZES, **LLAMA4, "use_qk_norm": False, "attn_temperature_tuning": False, "no_rope_layers": [0, 1, 1],
            "moe_layers": [1, 2], "layer_types": ["full_attention", "chunked_attention", "full_attention"],
        },
    ),
    "gemma4": (  # as the model of 2 billion parameters
        "Gemma4TextConfig",
        {
            **SIZES, **GEMMA4, "num_hidden_layers": 9, "num_key_value_heads": 1, "num_kv_shared_layers": 3,
            "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 3, "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB,
        },
    ),
    "gemma4-plain": (  # as the model of 31 billion
        "Gemma4TextConfig",
        {
            **SIZES, **GEMMA4, "num_hidden_layers": 6, "num_key_value_heads": 4, "num_global_key_value_heads": 2,
            "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2, "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
        },
    ),
}  # fmt: skip
