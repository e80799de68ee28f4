"""The vision tower of Qwen2-VL (arXiv:2409.12191) and Qwen2.5-VL (arXiv:2502.13923), written for one device.

    x = patches @ patch
    x = x + attention(norm(x)); x = x + mlp(norm(x))        for each layer
    y = w_out gelu(w_in concat(norm(x) of merge * merge patches))

A row holds the patches of several images. A patch sees those of its own image or, in layers with windows, those of its
own window. Half of the pairs of each head turn with the patch's row in the image, half with its column.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from autoshard.models.decoder.layers import Norm, normal, zeros
from autoshard.models.decoder.quantized_weight import project
from autoshard.models.decoder.stacks import make_segments, make_sides, run_segments
from autoshard.models.vision.config import TowerConfig


class Merger(nnx.Module):
    """Makes one feature of `merge * merge` neighbouring patches.

    Parameters, with w the width of all these patches: `w_in [w, w]`, `b_in [w]`, `w_out [w, out_width]`,
    `b_out [out_width]`.
    """

    def __init__(self, cfg: TowerConfig, key: jax.Array):
        encoder, self.wide = cfg.encoder, cfg.merge**2 * cfg.width
        in_key, out_key = jax.random.split(key)
        self.norm = Norm(encoder, cfg.width)
        self.w_in, self.b_in = normal(in_key, encoder, self.wide, self.wide), zeros(encoder, self.wide)
        self.w_out, self.b_out = normal(out_key, encoder, self.wide, cfg.out_width), zeros(encoder, cfg.out_width)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[rows, patches, width]` to `[rows, patches / merge**2, out_width]`."""
        x = self.norm(x).reshape(x.shape[0], -1, self.wide)
        y = jax.nn.gelu(project("bse,ef->bsf", x, self.w_in, self.b_in), approximate=False)
        return project("bsf,fe->bse", y, self.w_out, self.b_out)


class VisionTower(nnx.Module):
    """Maps the patches of images to features.

    Args:
        cfg: shape and numerics.
        rngs: its `params` stream initializes the parameters.

    Parameters: `patch [channels, frames, patch, patch, width]`, those of the layers, and those of the merger.

    >>> cfg = TowerConfig(width=16, layers=2, heads=2, ffn=32, out_width=8, patch=4)
    >>> ids = jnp.zeros((1, 8), jnp.int32)
    >>> VisionTower(cfg, rngs=nnx.Rngs(0))(jnp.zeros((1, 8, 96)), jnp.zeros((2, 1, 8), jnp.int32), ids).shape
    (1, 2, 8)
    """

    def __init__(self, cfg: TowerConfig, *, rngs: nnx.Rngs):
        self.cfg = cfg
        patch_key, layers_key, merger_key = jax.random.split(rngs.params(), 3)
        self.patch = normal(patch_key, cfg.encoder, cfg.channels, cfg.frames, cfg.patch, cfg.patch, cfg.width)
        self.segments = make_segments(cfg.encoder, layers_key)
        self.merger = Merger(cfg, merger_key)

    def __call__(
        self,
        patches: jax.Array,
        positions: jax.Array,
        segment_ids: jax.Array,
        region_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Compute the features of images.

        Args:
            patches: values of each patch, by channel, frame, row and column, `[rows, patches, patch_size]`. Patches
                that are merged into one feature follow each other.
            positions: row and column of each patch in its image, `[2, rows, patches]`.
            segment_ids: the image, or the frames of a video, of each patch, `[rows, patches]`.
            region_ids: the window of each patch, `[rows, patches]`; needed if layers have windows.

        Returns:
            `[rows, patches / merge**2, out_width]` in `cfg.dtype`.
        """
        cfg = self.cfg
        self._check(patches, region_ids)
        weight = self.patch[...].astype(cfg.dtype).reshape(cfg.patch_size, cfg.width)
        x = jnp.einsum("bpi,ie->bpe", patches.astype(cfg.dtype), weight)
        x = run_segments(cfg.encoder, self.segments, x, make_sides(cfg.encoder, positions, segment_ids, region_ids))
        return self.merger(x)

    def _check(self, patches: jax.Array, region_ids: jax.Array | None) -> None:
        size, merged = self.cfg.patch_size, self.cfg.merge**2
        if patches.ndim != 3 or patches.shape[2] != size or patches.shape[1] % merged:
            raise ValueError(
                f"VisionTower: patches must be [rows, patches, {size}], with a number of patches that is a multiple of "
                f"{merged}, not {list(patches.shape)}"
            )
        if region_ids is None and any(kind.scope == "region" for kind in self.cfg.encoder.kinds):
            raise ValueError("VisionTower: layers have windows; give region_ids, the window of each patch")
