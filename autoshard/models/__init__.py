"""Models in Flax, one file each, written for one device and without a sharding annotation."""

if __name__ != "autoshard.models":  # through the link at the root: no second copy may come to be
    raise ImportError("'models' at the root is only a link: import autoshard.models instead")

from autoshard.models.attention import attention
from autoshard.models.gpt import (
    GPT,
    REMAT_POLICIES,
    GPTConfig,
    flops_per_token,
    loss_fn,
    parameter_count,
    restack,
)
from autoshard.models.loss import cross_entropy
from autoshard.models.sample import generate

__all__ = [
    "GPT",
    "REMAT_POLICIES",
    "GPTConfig",
    "attention",
    "cross_entropy",
    "flops_per_token",
    "generate",
    "loss_fn",
    "parameter_count",
    "restack",
]
