"""Copies of steps, and models for other programs: safetensors files, LoRA adapters."""
