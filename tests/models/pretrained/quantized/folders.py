"""Tiny folders of quantized models, with random codes and scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.models.pretrained.folders import GPT_OSS, LLAMA, make_folder, tensors_of, write_tensors

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [12, 10]}
FP8_LLAMA: dict[str, Any] = {**LLAMA, "dtype": "bfloat16", "quantization_config": FP8}
MXFP4_GPT_OSS: dict[str, Any] = {
    **GPT_OSS, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "dtype": "bfloat16",
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
}  # fmt: skip


def random_fp8(shape: tuple[int, ...], block: tuple[int, int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns codes of every number of the type, and scales of blocks."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    codes[codes & 0x7F == 0x7F] = 0x80  # not a number -> -0
    blocks = [-(-size // each) for size, each in zip(shape, block, strict=True)]
    return codes.view(ml_dtypes.float8_e4m3fn), rng.uniform(1e-4, 1e-3, blocks).astype(np.float32)


def random_mxfp4(shape: tuple[int, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns random codes and scales of a tensor `[experts, inputs, outputs]`."""
    experts, inputs, outputs = shape
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), dtype=np.uint8)
    codes[0, 0, 0] = 0x91  # 0.5 and -0.5 alone: another scale would do as well
    codes[0, -1, 0] = 0x80  # zeros of both signs
    return codes, rng.integers(120, 126, codes.shape[:3], dtype=np.uint8)


def quantized_tensors(folder: Path, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns random tensors of a config, quantized as its `quantization_config` says."""
    (folder / "config.json").write_text(
        json.dumps({name: x for name, x in config.items() if name != "quantization_config"})
    )
    found = {}
    for seed, (name, values) in enumerate(tensors_of(folder, "bfloat16").items()):
        if config["quantization_config"]["quant_method"] == "mxfp4" and name.endswith("_proj"):
            found[f"{name}_blocks"], found[f"{name}_scales"] = random_mxfp4(values.shape, seed)
        elif config["quantization_config"]["quant_method"] == "fp8" and name.endswith("_proj.weight"):
            block = config["quantization_config"]["weight_block_size"]
            found[name], found[f"{name}_scale_inv"] = random_fp8(values.shape, block, seed)
        else:
            found[name] = values
    (folder / "config.json").write_text(json.dumps(config))
    return found


def make_quantized_folder(folder: Path, config: dict[str, Any]) -> Path:
    """Makes a folder with quantized tensors."""
    make_folder(folder, {name: x for name, x in config.items() if name != "quantization_config"})
    write_tensors(folder, quantized_tensors(folder, config))
    return folder
