"""Default values of config fields, and the largest sizes that are accepted.

Source of the defaults: the config classes in transformers 5.24.
"""

from collections.abc import Mapping
from typing import Any

# MistralConfig, Qwen2Config, Qwen3Config and Qwen3MoeConfig: sliding_window, in positions.
WINDOW = 4096

# max_window_layers, in layers: of Qwen2Config and Qwen3Config, and of the text config of Qwen2-VL and Qwen2.5-VL.
QWEN_LAYERS_WITHOUT_WINDOW = 28
QWEN_VL_LAYERS_WITHOUT_WINDOW = 80

# rope_theta of MixtralConfig and GptOssConfig, and rope_parameters of GptOssConfig.
MIXTRAL_ROTARY_BASE = 1_000_000.0
GPT_OSS_ROTARY_BASE = 150_000.0
GPT_OSS_ROTARY: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}

# DeepseekV3Config: routed_scaling_factor, and first_k_dense_replace, in layers.
DEEPSEEK_V3_SCALE = 2.5
DEEPSEEK_V3_DENSE = 3

# Gemma2Config.
GEMMA2_CAPS: Mapping[str, float] = {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}

# Gemma3TextConfig. Published folders with a vision tower leave out what equals these values.
GEMMA3: Mapping[str, Any] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
}

# Llama4TextConfig.
LLAMA4_HEAD_DIM = 128  # head_dim
LLAMA4_CHUNK = 8192  # attention_chunk_size, in positions
LLAMA4_STEP = 8192  # floor_scale, in positions
LLAMA4_SCALE = 0.1  # attn_scale
LLAMA4_WITHOUT_ROTARY = 4  # no_rope_layer_interval, in layers
LLAMA4_ROTARY_BASE = 500_000.0  # rope_theta

# Gemma4TextConfig. The period is that of layer_types, in layers.
GEMMA4_PERIOD = 6
GEMMA4_WHOLE_HEAD_DIM = 512  # global_head_dim
GEMMA4_TOKENS = 262_144  # vocab_size_per_layer_input
GEMMA4_LAYER_WIDTH = 256  # hidden_size_per_layer_input
GEMMA4_ROTARY: Mapping[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}

# Largest number of layers, and of experts in a layer. Building a model takes time and memory for each of them, so a
# damaged config with a huge number is refused. Source: chosen. It is four times the largest published number, the 2048
# experts of Switch-C (arXiv:2101.03961). The deepest published transformer has 1000 layers (DeepNet, arXiv:2203.00555).
MOST_PARTS = 8192
