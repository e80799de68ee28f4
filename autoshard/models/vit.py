"""A vision transformer in Flax NNX, written for one device.

    x = patches(image) @ patch; x = [class token, x] + position
    x = x + attention(norm(x)); x = x + mlp(norm(x))        for each layer
    logits = norm(x)[class token, or mean] @ head

The layers are those of `GPT` without the causal mask, with LayerNorm, GELU and biases. They are scanned or a list.

Sources: Dosovitskiy et al. (arXiv:2010.11929); mean pooling instead of a class token, Beyer et al. (arXiv:2205.01580).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from autoshard.models.attention import Impl
from autoshard.models.gpt_config import GPTConfig
from autoshard.models.loss import cross_entropy
from autoshard.models.quantized import Quantization, align, project
from autoshard.models.scopes import scoped
from autoshard.models.stack import make_layers, run_layers
from autoshard.models.transformer import Block, Norm, bias, constant, dropout, dropout_keys, param

# The fields that a `ViTConfig` passes on to the config of its blocks.
_ENCODER = (
    "layers", "heads", "width", "ffn", "scan_layers", "remat", "attention", "dropout", "dtype", "param_dtype",
    "quantization", "norm_eps",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ViTConfig:
    """Shape and numerics of a `ViT`.

    Args:
        image_size: height and width of the images.
        patch: height and width of a patch; divides `image_size`.
        classes: number of distinct labels.
        pool: input of the head: `token`, a class token before the patches, or `mean`, the mean of the patches.
        layers: number of blocks.
        heads: attention heads; divides `width`.
        width: size of the residual stream.
        ffn: hidden size of the MLP; defaults to `4 * width`.
        scan_layers: whether the layers' parameters are stacked and the layers run in a scan.
        remat: what a layer saves for its backward pass, as in `GPTConfig`.
        attention: `plain`, `blockwise`, `auto` or `cudnn`, as in `GPTConfig`.
        dropout: dropout rate on the embedding and on each sublayer's output.
        dtype: dtype of the computation. Softmax, norms and the loss always use float32.
        param_dtype: dtype in which parameters are stored.
        quantization: `none`, `int8` or `fp8`, as in `GPTConfig`.
        norm_eps: added to the variance before its square root.
        activation: of the MLP: `gelu`, or `gelu_tanh`, its approximation by tanh.

    Raises:
        ValueError: if a field is invalid; the message names the invalid fields.
    """

    image_size: int = 224
    patch: int = 16
    classes: int = 1000
    pool: Literal["token", "mean"] = "token"
    layers: int = 12
    heads: int = 6
    width: int = 384
    ffn: int | None = None
    scan_layers: bool = True
    remat: str = "none"
    attention: Impl = "auto"
    dropout: float = 0.0
    dtype: str = "float32"
    param_dtype: str = "float32"
    quantization: Quantization = "none"
    norm_eps: float = 1e-6
    activation: Literal["gelu", "gelu_tanh"] = "gelu_tanh"

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("image_size", "patch", "classes")}
        problems = [f"{name} is {size}; it must be at least 1" for name, size in sizes.items() if size < 1]
        if not problems and self.image_size % self.patch:
            problems.append(f"image_size {self.image_size} is not a multiple of patch {self.patch}; change one of them")
        if self.activation not in ("gelu", "gelu_tanh"):
            problems.append(f"activation is {self.activation!r}; choose one of gelu, gelu_tanh")
        if self.pool not in ("token", "mean"):
            problems.append(f"pool is {self.pool!r}; choose one of token, mean")
        if problems:
            raise ValueError("ViTConfig: " + "; ".join(problems))
        try:
            _ = self.encoder  # checks the fields that it passes on
        except ValueError as error:
            raise ValueError(str(error).replace("GPTConfig", "ViTConfig", 1)) from None

    @property
    def positions(self) -> int:
        """Sequence length: the patches, plus the class token if there is one."""
        return (self.image_size // self.patch) ** 2 + (self.pool == "token")

    @property
    def encoder(self) -> GPTConfig:
        """The config of the blocks."""
        return GPTConfig(
            context=self.positions,
            positions="learned",
            norm="layernorm",
            mlp="gelu_exact" if self.activation == "gelu" else "gelu",
            bias=True,
            **{name: getattr(self, name) for name in _ENCODER},
        )


class ViT(nnx.Module):
    """A vision transformer: maps images `[batch, image_size, image_size, 3]` to logits `[batch, classes]`.

    Args:
        cfg: shape and numerics of the model.
        rngs: its `params` stream initializes the parameters, as in a `GPT`.

    >>> model = ViT(ViTConfig(image_size=8, patch=4, classes=5, layers=1, heads=2, width=8), rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((2, 8, 8, 3))).shape
    (2, 5)
    """

    def __init__(self, cfg: ViTConfig, *, rngs: nnx.Rngs):
        self.cfg = cfg
        encoder, width, inputs = cfg.encoder, cfg.width, 3 * cfg.patch**2
        patch_key, position_key, head_key, blocks_key = jax.random.split(rngs.params(), 4)
        self.patch = param(patch_key, encoder, (cfg.patch, cfg.patch, 3, width), inputs**-0.5)
        self.patch_bias = bias(encoder, width)
        self.token = constant(encoder, (width,), 0.0) if cfg.pool == "token" else None
        self.position = param(position_key, encoder, (cfg.positions, width), 0.02)
        blocks_keys = jax.random.split(blocks_key, cfg.layers)
        self.blocks = make_layers(lambda key: Block(encoder, key, causal=False), blocks_keys, scan=cfg.scan_layers)
        self.norm = Norm(encoder)
        self.head, self.head_bias = param(head_key, encoder, (width, cfg.classes), 0.02), bias(encoder, cfg.classes)

    def __call__(
        self, images: jax.Array, *, deterministic: bool = True, rngs: nnx.Rngs | jax.Array | None = None
    ) -> jax.Array:
        """Compute the logits of each image's label.

        Args:
            images: `[batch, image_size, image_size, 3]`.
            deterministic: whether dropout is off.
            rngs: source of the dropout key: an `nnx.Rngs` (its `dropout` stream) or a key.

        Returns:
            `[batch, classes]` in `cfg.dtype`.
        """
        keys = dropout_keys(self.cfg.encoder, deterministic, rngs)
        x = self._embed(images)
        if keys is not None:
            x, keys = dropout(x, self.cfg.dropout, keys[0]), keys[1:]
        x = scoped("layers", run_layers, self.blocks, x, keys, remat=self.cfg.remat)
        x = scoped("norm", self.norm, x)
        x = jnp.mean(x.astype(jnp.float32), axis=1).astype(x.dtype) if self.token is None else x[:, 0]
        return project("be,en->bn", x, self.head, self.head_bias)

    def _embed(self, images: jax.Array) -> jax.Array:
        """Embed images as `[batch, positions, width]`: the patch convolution, computed as a matrix product."""
        size, patch = self.cfg.image_size, self.cfg.patch
        if images.shape[1:] != (size, size, 3):
            raise ValueError(f"ViT: images must be [batch, {size}, {size}, 3], not {list(images.shape)}")
        batch, rows = images.shape[0], size // patch
        patches = images.astype(self.cfg.dtype).reshape(batch, rows, patch, rows, patch, 3)
        x = project("brpcqi,pqie->brce", patches, self.patch, self.patch_bias).reshape(batch, rows * rows, -1)
        if self.token is not None:
            token = jnp.broadcast_to(align(self.token[...].astype(x.dtype), 3), (batch, 1, x.shape[2]))
            x = jnp.concatenate([token, x], axis=1)
        return x + align(self.position[...].astype(x.dtype), 3)

    def loss(
        self,
        batch: Mapping[str, jax.Array],
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Return the cross-entropy in nats of `images` and `labels [batch]`, summed over images, and their number."""
        logits = self(batch["images"], deterministic=deterministic, rngs=rngs)
        return cross_entropy(logits, batch["labels"])
