"""The configuration of a vision tower, and of a decoder with one."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from autoshard._shown import shown
from autoshard.kernels.kernel_choice import Impl
from autoshard.models.decoder.config import Activation, DecoderConfig, NormKind
from autoshard.models.decoder.kinds import LayerKind
from autoshard.models.decoder.positions.rotary import Rotary
from autoshard.models.vision.constants import PLANNED_PATCHES

# The fields that a `TowerConfig` passes on to the config of its layers.
_LAYERS = (
    "width", "heads", "ffn", "activation", "gated", "norm", "norm_eps", "scan_layers", "remat", "attention",
    "block_size", "init_std", "dtype", "param_dtype",
)  # fmt: skip


@shown
@dataclasses.dataclass(frozen=True)
class TowerConfig:
    """Shape and numerics of a `VisionTower`.

    Args:
        width: size of the residual stream.
        layers: number of layers.
        heads: attention heads; a head has `width / heads` elements, a multiple of 4.
        ffn: hidden size of the MLP.
        out_width: size of a feature, that of the decoder's residual stream.
        patch: height and width of a patch, in pixels.
        frames: number of frames of a patch. An image is repeated.
        channels: number of colours.
        merge: `merge * merge` patches make one feature.
        window: height and width, in features, of the windows to which layers are limited; None means none.
        whole: the numbers of the layers that see the whole image in spite of `window`.
        base: base of the rotary positions.
        activation: of the MLP, as in `DecoderConfig`.
        gated: whether the MLP is gated.
        norm: kind of the norms.
        norm_eps: added to the mean square, or to the variance, before its root.
        scan_layers: whether the parameters of layers that repeat are stacked and run in a scan.
        remat: what the forward pass of a layer saves; see `GPTConfig`.
        attention: implementation of attention; see `models.attention`.
        block_size: number of keys in a block of blockwise attention.
        init_std: standard deviation of initial parameters.
        dtype: dtype of the computation. Softmax, norms and rotary positions use float32.
        param_dtype: dtype in which parameters are stored.

    Raises:
        ValueError: if a field is invalid; the message names every invalid field.
    """

    width: int
    layers: int
    heads: int
    ffn: int
    out_width: int
    patch: int = 14
    frames: int = 2
    channels: int = 3
    merge: int = 2
    window: int | None = None
    whole: tuple[int, ...] = ()
    base: float = 10_000.0
    activation: Activation = "quick_gelu"
    gated: bool = False
    norm: NormKind = "layer"
    norm_eps: float = 1e-6
    scan_layers: bool = True
    remat: str = "none"
    attention: Impl = "auto"
    block_size: int = 512
    init_std: float = 0.02
    dtype: str = "float32"
    param_dtype: str = "float32"

    def __post_init__(self) -> None:
        sizes = ("width", "layers", "heads", "ffn", "out_width", "patch", "frames", "channels", "merge")
        problems = [
            f"{name} is {getattr(self, name)}; it must be at least 1" for name in sizes if getattr(self, name) < 1
        ]
        if not problems and self.width % (4 * self.heads):
            problems.append(
                f"width is {self.width}; it must be a multiple of 4 times the {self.heads} heads: half of each head "
                "turns with the row and half with the column, in pairs"
            )
        if self.window is not None and self.window < 1:
            problems.append(f"window is {self.window}; it must be at least 1")
        if any(not 0 <= number < self.layers for number in self.whole):
            problems.append(f"whole is {self.whole}; it must name layers from 0 to {self.layers - 1}")
        if problems:
            raise ValueError("TowerConfig: " + "; ".join(problems))
        try:
            _ = self.encoder  # checks the fields that it passes on
        except ValueError as error:
            raise ValueError(str(error).replace("DecoderConfig", "TowerConfig", 1)) from None

    @property
    def encoder(self) -> DecoderConfig:
        """The config of the layers, which are those of a `Decoder` that is not causal."""
        head_dim = self.width // self.heads
        rotary = Rotary(self.base, sections=(head_dim // 4, head_dim // 4), restart=True)
        kinds = [
            LayerKind(rotary=rotary, scope="document" if self.window is None or number in self.whole else "region")
            for number in range(self.layers)
        ]
        return DecoderConfig(
            vocab=1,
            context=1,
            kinds=tuple(kinds),
            kv_heads=self.heads,
            head_dim=head_dim,
            causal=False,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            **{name: getattr(self, name) for name in _LAYERS},
        )

    @property
    def patch_size(self) -> int:
        """Number of values of a patch."""
        return self.channels * self.frames * self.patch**2


@shown
@dataclasses.dataclass(frozen=True)
class VisionLanguageConfig:
    """A decoder with a vision tower.

    Args:
        text: the decoder.
        vision: the vision tower.
        image_token: the token in whose places the features of images are put.

    Raises:
        ValueError: if the two do not fit together.
    """

    text: DecoderConfig
    vision: TowerConfig
    image_token: int

    def __post_init__(self) -> None:
        if self.vision.out_width != self.text.width:
            raise ValueError(
                f"VisionLanguageConfig: vision.out_width is {self.vision.out_width}; it must be text.width, "
                f"{self.text.width}"
            )

    @property
    def layers(self) -> int:
        """Number of layers of the decoder."""
        return self.text.layers

    @property
    def context(self) -> int:
        """Maximum number of positions of a row."""
        return self.text.context

    @property
    def vocab(self) -> int:
        """Number of distinct tokens."""
        return self.text.vocab

    def batch(self, rows: int, seq: int, patches: int = PLANNED_PATCHES) -> dict[str, Any]:
        """Return the shapes of a batch: `rows` rows of `seq` positions, each with images of `patches` patches."""
        merged = self.vision.merge**2
        patches = -(-patches // merged) * merged
        tokens = jax.ShapeDtypeStruct((rows, seq), jnp.int32)
        ids = jax.ShapeDtypeStruct((rows, patches), jnp.int32)
        images = {
            "patches": jax.ShapeDtypeStruct((rows, patches, self.vision.patch_size), jnp.float32),
            "positions": jax.ShapeDtypeStruct((rows, 2, patches), jnp.int32),
            "segment_ids": ids,
            "region_ids": ids,
            "places": tokens,
        }
        positions = jax.ShapeDtypeStruct((rows, 3, seq), jnp.int32)
        return {"inputs": tokens, "targets": tokens, "positions": positions, "images": images}
