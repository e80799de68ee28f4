"""Steps and models for other programs: safetensors, LoRA."""
