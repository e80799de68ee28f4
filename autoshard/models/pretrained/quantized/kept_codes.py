"""Weights of a quantized folder that stay codes and scales on the devices.

The codes of a weight and the scales of its blocks are two parameters, `codes` and `scale` of a `QuantizedWeight`. Both
have the layout of the weight, so they are read and written as other parameters are. This works where each block is a
range of each dimension of the weight; other weights are decoded. In files, two codes of MXFP4 share a byte. Reading
separates them, and writing packs them again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from autoshard.ckpt.exchange.safetensors import Tensor
from autoshard.errors import AutoshardError, AutoshardWarning
from autoshard.models.decoder.quantized_weight import QuantizedWeight
from autoshard.models.pretrained.parameter_paths import owner_of, parameters_of
from autoshard.models.pretrained.quantized.fp8_blocks import Fp8Blocks, is_matrix
from autoshard.models.pretrained.quantized.mxfp4 import Mxfp4
from autoshard.models.pretrained.quantized.scheme import Scheme
from autoshard.models.pretrained.tables import Source, Stored, Table

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
    if scheme is None:
        raise AutoshardError(f"keep_codes is for quantized folders, in fp8 or MXFP4; {where!r} is not: leave it out")
    found, decoded = {}, []
    coded = {scheme.plain_name(name) for name, one in stored.items() if scheme.is_codes(one)}
    for path, source in sources.items():
        names = source.names.values()
        if all(name in coded for name in names):
            if (scales := scheme.scale_source(source)) is None:
                decoded.append(next(iter(names)))
            else:
                found[path] = source, scales
    if not found and not decoded:
        raise AutoshardError(f"keep_codes: {where!r} has no weights in {scheme.code_dtype}: leave keep_codes out")
    if decoded:
        problem = f"{decoded[0]} in {where!r}: its blocks are not ranges of the dimensions of its parameter"
        if not found:
            raise AutoshardError(f"keep_codes: no weight can stay quantized. {problem}: leave keep_codes out")
        more = f", and {len(decoded) - 1} more" if len(decoded) > 1 else ""
        warnings.warn(f"decoded, although keep_codes is given: {problem}{more}", AutoshardWarning, stacklevel=4)
    return found


def codes_of(sources: Mapping[str, Source], scheme: Scheme | None) -> dict[str, tuple[Source, Source]]:
    """Return those of the weights that can stay quantized, as `Kept`.

    Args:
        sources: the tensors of each of these weights, by its path.
        scheme: the scheme of their folder.
    """
    scales = {} if scheme is None else {path: scheme.scale_source(source) for path, source in sources.items()}
    return {path: (sources[path], one) for path, one in scales.items() if one is not None}


def put_codes(
    model: nnx.Module, kept: Kept, scheme: Scheme, make: Callable[..., Any] = jax.ShapeDtypeStruct
) -> None:  # fmt: skip
    """Put codes and scales in the place of the weights of a model.

    Args:
        model: the model, which is changed.
        kept: the weights.
        scheme: the scheme in which they are quantized.
        make: makes an array from its shape and dtype; by default only its shape.
    """
    for path, (codes, scales) in kept.items():
        parent, name = owner_of(model, path)
        own, scale = (
            make(one.shape, jnp.dtype(dtype)) for one, dtype in zip((codes, scales), scheme.kept_dtypes, strict=True)
        )
        outputs, inputs = (len(group) for group in codes.layout.groups) if is_matrix(codes.layout) else (1, 1)
        setattr(parent, name, QuantizedWeight(own, scale, scheme.form, inputs, outputs))


def with_stored(
    tensors: Mapping[str, Tensor], stored: Mapping[str, Tensor], kept: Kept, scheme: Scheme | None
) -> dict[str, Tensor]:
    """Return the tensors of a folder with those of the kept weights as codes and scales, and the others decoded."""
    names = {name for both in kept.values() for source in both for name in source.names.values()}
    of_codes = stored if scheme is None else scheme.kept(stored)
    return {**tensors, **{name: of_codes[name] for name in names}}


def parameters_of_codes(kept: Kept) -> dict[str, Source]:
    """Return the tensors of the codes and scales, by the path of the parameter."""
    return {
        f"{path}/{name}": source
        for path, both in kept.items()
        for name, source in zip((CODES, SCALE), both, strict=True)
    }


def with_codes(table: Table) -> Table:
    """Return a table with rows for the codes and the scales of its matrices, and of its stacks of matrices."""
    suffixes = {
        path: scheme.scales for path, row in table.items() for scheme in (Fp8Blocks, Mxfp4) if scheme.fits(row.layout)
    }
    codes = {f"{path}/{CODES}": table[path] for path in suffixes}
    scales = {
        f"{path}/{SCALE}": Stored(table[path].name + suffix, table[path].layout) for path, suffix in suffixes.items()
    }
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
