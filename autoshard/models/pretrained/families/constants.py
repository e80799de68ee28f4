"""Default values of config fields, and the largest sizes that are accepted.

Source of the defaults: the config classes in transformers 5.24.
"""

from collections.abc import Mapping
from typing import Any

# Llama4TextConfig.
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
