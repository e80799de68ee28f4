"""Writes a model in the form of its family, one tensor at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from autoshard.ckpt.exchange.constants import SHARD_BYTES
from autoshard.ckpt.exchange.safetensors import Tensor, write
from autoshard.errors import AutoshardError
from autoshard.models.pretrained.families import known_families
from autoshard.models.pretrained.folder import CONFIG
from autoshard.models.pretrained.load import _by_path
from autoshard.models.pretrained.tables import Source, sources_of


def save_pretrained(model: nnx.Module, path: Any, *, dtype: str | None = None, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a model to a new folder in the form of its family, as `transformers` reads it.

    Args:
        model: a model of `load_pretrained`, from any mesh, with its layers stacked or separate.
        path: a new or empty folder.
        dtype: dtype of floating-point tensors; by default that of the parameters.
        shard_bytes: largest number of bytes of tensors in one file; several files have an index.

    Raises:
        AutoshardError: the model has no family, or the folder is not empty.
    """
    origin = getattr(model, "origin", None)
    if origin is None:
        raise AutoshardError("save_pretrained: the model was not loaded by load_pretrained, so its family is not known")
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise AutoshardError(f"save_pretrained: {str(folder)!r} exists already: use a new folder")
    family = known_families()[origin.family]
    values = _by_path(nnx.to_pure_dict(nnx.state(model)))
    cfg = getattr(model, "cfg")  # noqa: B009  # each family's model has one, of its own type
    shapes = {path: leaf.shape for path, leaf in values.items()}
    sources = sources_of(family.stacks(cfg), family.spelled(cfg, origin.spelling), shapes)
    parts: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, source in sources.items():
        for index, tensor in source.names.items():
            parts.setdefault(tensor, []).append((name, index))
    tensors = [_tensor(name, pieces, sources, values, dtype) for name, pieces in sorted(parts.items())]
    draft = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        write(draft, tensors, shard_bytes=shard_bytes, metadata={"format": "pt"})
        config = origin.values()
        kinds = [one.dtype for one in tensors]
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = max(set(kinds), key=kinds.count)
        (draft / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        draft.replace(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _tensor(
    name: str,
    pieces: Sequence[tuple[str, tuple[int, ...]]],
    sources: Mapping[str, Source],
    values: Mapping[str, jax.Array],
    dtype: str | None,
) -> Tensor:
    """Return a tensor that is made of parts of parameters, read on demand."""
    shape = sources[pieces[0][0]].tensor_shape
    kind = dtype or str(values[pieces[0][0]].dtype)

    def read() -> np.ndarray:
        tensor = np.empty(shape, kind)
        for path, index in pieces:
            sources[path].layout.write(tensor, gathered(values[path], index).astype(kind, copy=False))
        return tensor

    return Tensor(name, shape, kind, read)


def gathered(x: jax.Array, index: tuple[int, ...]) -> np.ndarray:
    """Return the values of a sharded array at an index of its leading dimensions, in the host's memory."""
    found = np.empty(x.shape[len(index) :], x.dtype)
    for shard in x.addressable_shards:
        outer, inner = shard.index[: len(index)], shard.index[len(index) :]
        ranges = [i.indices(n)[:2] for i, n in zip(outer, x.shape, strict=False)]
        if all(start <= at < stop for at, (start, stop) in zip(index, ranges, strict=True)):
            place = tuple(at - start for at, (start, _) in zip(index, ranges, strict=True))
            found[inner] = np.asarray(shard.data)[place]
    return found
