"""Operators that move elements without computing: reshapes, pads, copies, slices and concatenations."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.spmdrules.catalogue.entry import Operator, f32


def pixel_shuffle(x: jax.Array, factor: int) -> jax.Array:
    """Turns channels into pixels: [batch, height, width, channels * factor²] -> [batch, height * factor, ...]."""
    batch, height, width, channels = x.shape
    kept = channels // factor**2
    x = x.reshape(batch, height, width, factor, factor, kept)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, height * factor, width * factor, kept)


def pixel_unshuffle(x: jax.Array, factor: int) -> jax.Array:
    """Turns pixels into channels. The inverse of `pixel_shuffle`."""
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height // factor, factor, width // factor, factor, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, height // factor, width // factor, factor**2 * channels)


def channel_shuffle(x: jax.Array, groups: int) -> jax.Array:
    """Distributes the channels of each group over all groups (Zhang et al., 2018)."""
    *kept, channels = x.shape
    return x.reshape(*kept, groups, channels // groups).swapaxes(-1, -2).reshape(x.shape)


def patchify(x: jax.Array, size: int) -> jax.Array:
    """Splits images into square patches: [batch, height, width, channels] -> [batch, patches, values]."""
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height // size, size, width // size, size, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, size**2 * channels)


def window_partition(x: jax.Array, size: int) -> jax.Array:
    """Splits images into square windows, each a batch element (Liu et al., 2021)."""
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height // size, size, width // size, size, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, size, size, channels)


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    """[batch, seq, heads * size] -> [batch, heads, seq, size]."""
    batch, seq, width = x.shape
    return x.reshape(batch, seq, heads, width // heads).swapaxes(1, 2)


def merge_heads(x: jax.Array) -> jax.Array:
    """The inverse of `split_heads`."""
    batch, heads, seq, size = x.shape
    return x.swapaxes(1, 2).reshape(batch, seq, heads * size)


def token_shift(x: jax.Array) -> jax.Array:
    """Shifts positions by one and fills the first with zeros, as in RWKV's token mixing."""
    return jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]


def pad_or_crop(x: jax.Array, before: int, after: int, between: int) -> jax.Array:
    """Pads dimension 1 with zeros. Negative padding crops. `between` zeros go between adjacent elements."""
    dims = [(0, 0, 0), (before, after, between), *[(0, 0, 0)] * (x.ndim - 2)]
    return lax.pad(x, jnp.zeros((), x.dtype), dims)


def stack_pair(x: jax.Array, y: jax.Array) -> jax.Array:
    """Stacks two arrays along a new dimension 1."""
    return jnp.stack([x, y], 1)


def concatenate_pair(x: jax.Array, y: jax.Array) -> jax.Array:
    """Concatenates two arrays along dimension 1."""
    return jnp.concatenate([x, y], 1)


def diag_embed(x: jax.Array) -> jax.Array:
    """A diagonal matrix for each vector of a batch."""
    return jax.vmap(jnp.diag)(x)


_X, _IMAGE = f32(4, 8, 12), f32(4, 8, 16, 12)
_MARGIN = ((0, 0), (2, 3), (0, 0))
_REPEATS = np.array([0, 3, 1, 2, 0, 4, 1, 1], np.int32)

_PADDING = (
    Operator("pad", partial(jnp.pad, pad_width=_MARGIN), (_X,)),
    *(
        Operator(f"pad_{name}", partial(jnp.pad, pad_width=_MARGIN, mode=mode), (_X,))
        for name, mode in {"reflect": "reflect", "symmetric": "symmetric", "edge": "edge", "circular": "wrap"}.items()
    ),
    Operator("pad_negative", partial(pad_or_crop, before=-1, after=-3, between=0), (_X,)),
    Operator("pad_interior", partial(pad_or_crop, before=0, after=0, between=2), (_X,)),
    Operator("token_shift", token_shift, (_X,)),
)
_SHAPES = (
    Operator("reshape", partial(jnp.reshape, shape=(4, 8, 24)), (f32(4, 16, 12),), note="splits and merges"),
    Operator("flatten", partial(jnp.reshape, shape=(4, -1)), (_X,)),
    Operator("ravel", jnp.ravel, (_X,)),
    Operator("unflatten", partial(jnp.reshape, shape=(4, 8, 12, 5)), (f32(4, 8, 60),)),
    Operator("merge_batch", partial(jnp.reshape, shape=(-1, 12)), (_X,)),
    Operator("split_heads", partial(split_heads, heads=4), (f32(8, 16, 12),)),
    Operator("merge_heads", merge_heads, (f32(8, 4, 16, 12),)),
    Operator("squeeze", partial(jnp.squeeze, axis=1), (f32(4, 1, 8),)),
    Operator("expand_dims", partial(jnp.expand_dims, axis=1), (_X,)),
    Operator("transpose", jnp.transpose, (_X,)),
    Operator("permute", partial(jnp.transpose, axes=(1, 2, 0)), (_X,)),
    Operator("swapaxes", partial(jnp.swapaxes, axis1=0, axis2=2), (_X,)),
    Operator("moveaxis", partial(jnp.moveaxis, source=0, destination=-1), (_X,)),
    Operator("broadcast_to", partial(jnp.broadcast_to, shape=(16, 4, 8)), (f32(4, 8),)),
    Operator("expand", partial(jnp.broadcast_to, shape=(4, 8, 12)), (f32(4, 1, 12),), note="a dimension of size 1"),
)
_COPIES = (
    Operator("tile", partial(jnp.tile, reps=(1, 3, 1)), (_X,)),
    Operator("repeat", partial(jnp.repeat, repeats=3, axis=1), (_X,)),
    Operator("repeat_interleave", partial(jnp.repeat, axis=1, total_repeat_length=12), (f32(4, 8), _REPEATS)),
    Operator("roll", partial(jnp.roll, shift=3, axis=1), (_X,)),
    Operator("roll_two", partial(jnp.roll, shift=(1, -2), axis=(1, 2)), (_IMAGE,), note="as for shifted windows"),
    Operator("flip", partial(jnp.flip, axis=1), (_X,)),
    Operator("rot90", partial(jnp.rot90, axes=(1, 2)), (_IMAGE,)),
    Operator("triu", partial(jnp.triu, k=1), (_X,)),
    Operator("tril", jnp.tril, (_X,)),
    Operator("diag", jnp.diag, (f32(8),)),
    Operator("diag_embed", diag_embed, (f32(4, 8),)),
    Operator("diagonal", partial(jnp.diagonal, axis1=1, axis2=2), (f32(4, 8, 8),)),
    Operator("meshgrid", jnp.meshgrid, (f32(4), f32(8)), (0, 1)),
)
_SLICES = (
    Operator("slice", partial(lax.slice_in_dim, start_index=2, limit_index=6, axis=1), (_X,)),
    Operator("strided_slice", partial(lax.slice_in_dim, start_index=1, limit_index=8, stride=2, axis=1), (_X,)),
    Operator("split", partial(jnp.split, indices_or_sections=2, axis=1), (_X,)),
    Operator("split_unevenly", partial(jnp.split, indices_or_sections=[1, 5], axis=1), (_X,)),
    Operator("unbind", partial(jnp.unstack, axis=1), (_X,)),
    Operator("stack", stack_pair, (_X, f32(4, 8, 12)), (0, 1)),
    Operator("concatenate", concatenate_pair, (_X, f32(4, 16, 12)), (0, 1)),
    Operator("hstack", lambda x, y: jnp.hstack([x, y]), (f32(4, 8), f32(4, 12)), (0, 1)),
    Operator("vstack", lambda x, y: jnp.vstack([x, y]), (f32(4, 12), f32(8, 12)), (0, 1)),
)
_IMAGE_OPERATORS = (
    Operator("pixel_shuffle", partial(pixel_shuffle, factor=2), (f32(4, 8, 12, 32),)),
    Operator("pixel_unshuffle", partial(pixel_unshuffle, factor=2), (_IMAGE,)),
    Operator("channel_shuffle", partial(channel_shuffle, groups=4), (f32(4, 8, 16),)),
    Operator("patchify", partial(patchify, size=2), (_IMAGE,)),
    Operator("window_partition", partial(window_partition, size=2), (_IMAGE,)),
)
OPERATORS: tuple[Operator, ...] = (*_PADDING, *_SHAPES, *_COPIES, *_SLICES, *_IMAGE_OPERATORS)
