"""Sizes of exported files."""

# Largest number of bytes of tensors in one safetensors file, unless a single tensor is larger. A larger model is split
# over several files. Source: the default of Hugging Face's `save_pretrained`.
SHARD_BYTES = 5_000_000_000
