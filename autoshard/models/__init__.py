"""Models in Flax NNX, written for one device and without sharding annotations."""

if __name__ != "autoshard.models":  # imported through the link at the root, which would load a second copy
    raise ImportError("'models' at the root is only a link: import autoshard.models instead")

from autoshard.models.attention import attention
from autoshard.models.decoder import Decoder, DecoderConfig
from autoshard.models.gpt import GPT, loss_fn, parameter_count, restack
from autoshard.models.gpt_config import GPTConfig, flops_per_token
from autoshard.models.llama import LLAMA
from autoshard.models.loss import cross_entropy
from autoshard.models.moe import MoE
from autoshard.models.moe_config import MoEConfig
from autoshard.models.pretrained import load_pretrained, plan_pretrained, save_pretrained
from autoshard.models.remat.policies import REMAT_POLICIES
from autoshard.models.sample import generate
from autoshard.models.sizes import ALPA_GPT, ALPA_MOE, ALPA_WIDE_RESNET, GPT3, MISTRAL, MIXTRAL, VIT
from autoshard.models.vit import ViT, ViTConfig
from autoshard.models.wide_resnet import WideResNet, WideResNetConfig
from autoshard.models.workloads import WORKLOADS, Workload, workload

__all__ = [
    "ALPA_GPT",
    "ALPA_MOE",
    "ALPA_WIDE_RESNET",
    "GPT",
    "GPT3",
    "LLAMA",
    "MISTRAL",
    "MIXTRAL",
    "REMAT_POLICIES",
    "VIT",
    "WORKLOADS",
    "Decoder",
    "DecoderConfig",
    "GPTConfig",
    "MoE",
    "MoEConfig",
    "ViT",
    "ViTConfig",
    "WideResNet",
    "WideResNetConfig",
    "Workload",
    "attention",
    "cross_entropy",
    "flops_per_token",
    "generate",
    "load_pretrained",
    "loss_fn",
    "parameter_count",
    "plan_pretrained",
    "restack",
    "save_pretrained",
    "workload",
]
