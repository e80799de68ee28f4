"""Weights of a quantized folder that stay codes and scales on the devices.

The codes of a weight and the scales of its blocks are two parameters, `codes` and `scale` of a `QuantizedWeight`. Both
have the layout of the weight, so they are read and written as other parameters are. This works where each block is a
range of each dimension of the weight; other weights are decoded.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from autoshard.ckpt.exchange.safetensors import Tensor
from autoshard.errors import AutoshardError, AutoshardWarning
from autoshard.models.decoder.quantized_weight import QuantizedWeight
from autoshard.models.pretrained.layouts import PART, Layout
from autoshard.models.pretrained.parameter_paths import owner_of, parameters_of
from autoshard.models.pretrained.quantized.fp8_blocks import Fp8Blocks
from autoshard.models.pretrained.quantized.scheme import Scheme
from autoshard.models.pretrained.tables import Source, Stored, Table

FORM = "fp8"
CODES, SCALE = "codes", "scale"

Kept = Mapping[str, tuple[Source, Source]]
"""Path of each weight that stays quantized -> the tensors of its codes, and those of its scales."""


def kept_weights(
    sources: Mapping[str, Source], stored: Mapping[str, Tensor], scheme: Scheme | None, where: str
) -> dict[str, tuple[Source, Source]]:
    """Return the weights of a folder that can stay quantized, as `Kept`. Warn of quantized weights that cannot.

    Args:
        sources: the tensors of each parameter, by its path.
        stored: the folder's tensors as they are stored.
        scheme: the scheme in which they are quantized.
        where: the folder, for messages.

    Raises:
        AutoshardError: no weight can stay quantized.
    """
    if not isinstance(scheme, Fp8Blocks):
        raise AutoshardError(f"keep_codes is for folders in fp8 with scales of blocks; {where!r} is not: leave it out")
    found, decoded = {}, []
    for path, source in sources.items():
        names = source.names.values()
        if all(stored[name].dtype == scheme.code_dtype for name in names):
            both = codes_and_scales(source, scheme)
            if both is None:
                decoded.append(next(iter(names)))
            else:
                found[path] = both
    if not found and not decoded:
        raise AutoshardError(f"keep_codes: {where!r} has no weights in {scheme.code_dtype}: leave keep_codes out")
    if decoded:
        reason = f"blocks of {scheme.rows} x {scheme.columns} are not ranges of the dimensions of its parameter"
        problem = f"{decoded[0]} in {where!r}: {reason}"
        if not found:
            raise AutoshardError(f"keep_codes: no weight can stay quantized. {problem}: leave keep_codes out")
        more = f", and {len(decoded) - 1} more" if len(decoded) > 1 else ""
        warnings.warn(f"decoded, although keep_codes is given: {problem}{more}", AutoshardWarning, stacklevel=4)
    return found


def codes_and_scales(source: Source, scheme: Fp8Blocks) -> tuple[Source, Source] | None:
    """Return the tensors of a weight's codes and of its scales; None if the weight cannot stay quantized."""
    shape, block = source.shape[source.leading :], (scheme.rows, scheme.columns)
    counts = block_counts(source.layout, shape, block) if _is_matrix(source.layout) else None
    if counts is None:
        return None
    scales = {index: name + scheme.scales for index, name in source.names.items()}
    return source, Source((*source.shape[: source.leading], *counts), scales, source.leading, source.layout)


def codes_of(sources: Mapping[str, Source], scheme: Scheme | None) -> dict[str, tuple[Source, Source]]:
    """Return those of the weights that can stay quantized, as `Kept`.

    Args:
        sources: the tensors of each of these weights, by its path.
        scheme: the scheme of their folder.
    """
    both = {path: codes_and_scales(source, scheme) for path, source in sources.items() if isinstance(scheme, Fp8Blocks)}
    return {path: one for path, one in both.items() if one is not None}


def block_counts(layout: Layout, shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...] | None:
    """Return the number of blocks in each dimension of a weight; None if blocks are not ranges of its dimensions.

    Args:
        layout: how the tensor becomes the weight.
        shape: the shape of the weight.
        block: the number of rows and of columns of a block of the tensor.

    >>> block_counts(Layout("(h d) e -> e h d"), (512, 8, 64), (128, 128))
    (4, 4, 1)
    >>> block_counts(Layout("(h d) e -> e h d"), (512, 8, 192), (128, 128)) is None
    True
    """
    sizes, counts = dict(zip(layout.names, shape, strict=True)), {}
    for group, length in zip(layout.groups, block, strict=True):
        rest = min(length, math.prod(sizes[name] for name in group))
        for name in reversed(group):
            size = sizes[name]
            if max(rest, size) % min(rest, size):
                return None
            counts[name] = size // min(rest, size)
            rest = max(rest // size, 1)
    return tuple(counts[name] for name in layout.names)


def put_codes(model: nnx.Module, kept: Kept, make: Callable[..., Any] = jax.ShapeDtypeStruct) -> None:
    """Put codes and scales in the place of the weights of a model.

    Args:
        model: the model, which is changed.
        kept: the weights.
        make: makes an array from its shape and dtype; by default only its shape.
    """
    for path, (codes, scales) in kept.items():
        parent, name = owner_of(model, path)
        both = make(codes.shape, jnp.float8_e4m3fn), make(scales.shape, jnp.float32)
        outputs, inputs = (len(group) for group in codes.layout.groups)
        setattr(parent, name, QuantizedWeight(*both, FORM, inputs, outputs))


def with_stored(tensors: Mapping[str, Tensor], stored: Mapping[str, Tensor], kept: Kept) -> dict[str, Tensor]:
    """Return the tensors of a folder with those of the kept weights as they are stored, and the others decoded."""
    names = {name for both in kept.values() for source in both for name in source.names.values()}
    return {**tensors, **{name: stored[name] for name in names}}


def parameters_of_codes(kept: Kept) -> dict[str, Source]:
    """Return the tensors of the codes and scales, by the path of the parameter."""
    return {
        f"{path}/{name}": source
        for path, both in kept.items()
        for name, source in zip((CODES, SCALE), both, strict=True)
    }


def with_codes(table: Table) -> Table:
    """Return a table with rows for the codes and the scales of its matrices."""
    matrices = {path: row for path, row in table.items() if _is_matrix(row.layout)}
    codes = {f"{path}/{CODES}": row for path, row in matrices.items()}
    scales = {f"{path}/{SCALE}": Stored(row.name + Fp8Blocks.scales, row.layout) for path, row in matrices.items()}
    return {**table, **codes, **scales}


def is_of_codes(path: str, paths: Mapping[str, Any]) -> bool:
    """Return whether a parameter holds the codes or the scales of a weight. `paths` are those of all parameters."""
    stem, _, name = path.rpartition("/")
    return name in (CODES, SCALE) and f"{stem}/{CODES}" in paths


def weight_shapes(model: nnx.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight of a model by its path. One that stays quantized has the shape of its codes."""
    shapes = {path: leaf.shape for path, leaf in parameters_of(model).items()}
    codes = {path.removesuffix(f"/{CODES}"): shape for path, shape in shapes.items() if path.endswith(f"/{CODES}")}
    return {path: shape for path, shape in shapes.items() if not is_of_codes(path, shapes)} | codes


def _is_matrix(layout: Layout) -> bool:
    """Return whether a layout makes a matrix `[*inputs, *outputs]` of one tensor `[outputs, inputs]`."""
    groups = layout.groups
    return len(groups) == 2 and PART not in groups[0] + groups[1] and layout.names == groups[1] + groups[0]
