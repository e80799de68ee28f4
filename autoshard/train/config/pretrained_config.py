"""The settings of a run that starts from a pretrained folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autoshard.kernels.kernel_choice import Impl


@dataclass(frozen=True)
class PretrainedConfig:
    """The folder that a run starts from, and how its model is trained."""

    folder: Path | None = None
    """Folder with config.json and safetensors files, as it comes from the Hugging Face Hub; --from is short for this.
    Its model is trained in the place of --model, with its tokenizer unless --tokenizer is given. Of --gpt.*, only
    context is used."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the parameters and of the optimizer's state. Default: the stored one."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the computation. Default: that of the parameters."""
    keep_codes: bool = False
    """Whether the weights of a quantized folder stay codes and scales. They are frozen, so it needs --lora.rank."""
    remat: str = "none"
    """What layers keep for the backward pass, as --gpt.remat."""
    attention: Impl = "auto"
    """Implementation of attention, as --gpt.attention."""
    scan_layers: bool = True
    """Whether layers of one kind are stacked and run in a scan."""
    router_loss: float | None = None
    """Factor of the loss that balances the load of experts. Default: router_aux_loss_coef of the folder's config if its
    output_router_logits is true, else 0."""
    loss_chunks: int = 1
    """Number of chunks of the vocabulary in which the loss is computed."""
