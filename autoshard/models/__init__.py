"""Models in Flax NNX, written for one device and without sharding annotations.

Public names are imported on first use, so that a program that needs one model does not import the planner, which
loads pretrained ones. `__init__.pyi` declares them for type checkers.
"""

from __future__ import annotations

from autoshard._first_use import on_first_use

if __name__ != "autoshard.models":  # imported through the link at the root, which would load a second copy
    raise ImportError("'models' at the root is only a link: import autoshard.models instead")

# Imported at once, because the function has the name of its module: importing the module later would hide it.
from autoshard.models.attention import attention

_MODULES = {
    "ALPA_GPT": "sizes",
    "ALPA_MOE": "sizes",
    "ALPA_WIDE_RESNET": "sizes",
    "cross_entropy": "loss",
    "Decoder": "decoder",
    "DecoderConfig": "decoder",
    "flops_per_token": "gpt_config",
    "generate": "sample",
    "GPT": "gpt",
    "GPT3": "sizes",
    "GPTConfig": "gpt_config",
    "LLAMA": "llama",
    "load_pretrained": "pretrained",
    "loss_fn": "gpt",
    "MISTRAL": "sizes",
    "MIXTRAL": "sizes",
    "MoE": "moe",
    "MoEConfig": "moe_config",
    "parameter_count": "gpt",
    "plan_pretrained": "pretrained",
    "REMAT_POLICIES": "remat.policies",
    "restack": "gpt",
    "save_pretrained": "pretrained",
    "VIT": "sizes",
    "ViT": "vit",
    "ViTConfig": "vit",
    "WideResNet": "wide_resnet",
    "WideResNetConfig": "wide_resnet",
    "Workload": "workloads",
    "workload": "workloads",
    "WORKLOADS": "workloads",
}

__all__ = ["attention", *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__, __dir__ = on_first_use(__name__, _MODULES)
