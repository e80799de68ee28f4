from autoshard.models.attention import attention
from autoshard.models.decoder import Decoder
from autoshard.models.decoder import DecoderConfig
from autoshard.models.gpt import GPT
from autoshard.models.gpt import loss_fn
from autoshard.models.gpt import parameter_count
from autoshard.models.gpt import restack
from autoshard.models.gpt_config import GPTConfig
from autoshard.models.gpt_config import flops_per_token
from autoshard.models.llama import LLAMA
from autoshard.models.loss import cross_entropy
from autoshard.models.moe import MoE
from autoshard.models.moe_config import MoEConfig
from autoshard.models.pretrained import load_pretrained
from autoshard.models.pretrained import plan_pretrained
from autoshard.models.pretrained import save_pretrained
from autoshard.models.remat.policies import REMAT_POLICIES
from autoshard.models.sample import generate
from autoshard.models.sizes import ALPA_GPT
from autoshard.models.sizes import ALPA_MOE
from autoshard.models.sizes import ALPA_WIDE_RESNET
from autoshard.models.sizes import GPT3
from autoshard.models.sizes import MISTRAL
from autoshard.models.sizes import MIXTRAL
from autoshard.models.sizes import VIT
from autoshard.models.vit import ViT
from autoshard.models.vit import ViTConfig
from autoshard.models.wide_resnet import WideResNet
from autoshard.models.wide_resnet import WideResNetConfig
from autoshard.models.workloads import WORKLOADS
from autoshard.models.workloads import Workload
from autoshard.models.workloads import workload

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
