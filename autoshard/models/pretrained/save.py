"""Writes a model in the form of its family, one tensor at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from autoshard.ckpt.exchange.constants import SHARD_BYTES
from autoshard.ckpt.exchange.export import cast_values
from autoshard.ckpt.exchange.safetensors import Tensor, write
from autoshard.errors import AutoshardError
from autoshard.models.pretrained.copied import copied_tensors
from autoshard.models.pretrained.families import known_families
from autoshard.models.pretrained.families.family import Config
from autoshard.models.pretrained.folder import CONFIG, Folder, float_dtype
from autoshard.models.pretrained.fresh import check_parameters, fresh_origin, written_config
from autoshard.models.pretrained.parameter_paths import parameters_of
from autoshard.models.pretrained.quantized.kept_codes import is_of_codes, with_codes
from autoshard.models.pretrained.quantized.scheme import cast_tensor
from autoshard.models.pretrained.quantized.schemes import QUANTIZATION, scheme_of
from autoshard.models.pretrained.tables import Source, sources_of


def save_pretrained(
    model: nnx.Module, path: Any, *, dtype: str | None = None, shard_bytes: int = SHARD_BYTES, copies: bool = True,
    family: str | None = None,
) -> None:  # fmt: skip
    """Write a model to a new folder in the form of its family, as `transformers` reads it.

    Tensors of a quantized folder are quantized again. Blocks whose values did not change keep their codes and scales,
    which are read from that folder. Tensors that the model does not use are copied from it; see `Family.copied`.

    Args:
        model: a model of `load_pretrained`, or a `Decoder` that was made here. It may be on any mesh, with its layers
            stacked or separate.
        path: a new or empty folder.
        dtype: `float32`, `bfloat16` or `float16` for all floating-point tensors; by default that of each parameter. If
            it is given, no tensor is quantized.
        shard_bytes: largest number of bytes of tensors in one file; several files have an index.
        copies: whether to write the tensors that the model does not use.
        family: the name of the family of a model that was not loaded, such as `mistral`; by default the first one that
            has such models.

    Raises:
        AutoshardError: the model belongs to no family, the folder is not empty, a value is too large for the dtype, or
            the folder that the model was read from is missing, and its scales or tensors are needed.
    """
    dtype = float_dtype(dtype, "save_pretrained")
    values, origin = parameters_of(model), getattr(model, "origin", None)
    shapes = {path: leaf.shape for path, leaf in values.items()}
    if any("/lora_" in path for path in values):
        raise AutoshardError(
            "save_pretrained: the model has adapters: write them by autoshard.models.adapters.save_adapter, and merge "
            "them by `autoshard ckpt merge`"
        )
    if origin is None:
        if any(is_of_codes(path, values) for path in values):
            raise AutoshardError(
                "save_pretrained: the model was not loaded, but has quantized weights: decode them first"
            )
        origin = fresh_origin(model, family)
    elif family is not None:
        raise AutoshardError(
            f"save_pretrained: family is {family!r}, but the model was loaded as {origin.family!r} and is written as "
            "such: leave family out"
        )
    own, cfg = known_families()[origin.family], getattr(model, "cfg")  # noqa: B009  # of the family's own type
    check_parameters(own, cfg, values)
    dtypes = {
        path: str(leaf.dtype) if is_of_codes(path, values) else dtype or str(leaf.dtype)
        for path, leaf in values.items()
    }
    tensors = tensors_of(
        sources_of(own.stacks(cfg), with_codes(own.spelled(cfg, origin.written_spelling)), shapes),
        dtypes,
        lambda path, index: cast_values(path, gathered(values[path], index), dtypes[path]),
    )
    tensors, config = sorted(tensors, key=lambda one: one.name), written_config(own, cfg, origin.values())
    coded = origin.quantized and dtype is None
    if coded:
        problem = "the model is quantized again with the scales of the folder that it was read from"
        with _source(problem, "give a dtype, such as 'bfloat16', for tensors that are not quantized"):
            tensors = _quantized(tensors, Folder.open(origin.folder))
    else:
        tensors = _decoded(tensors, config, dtype)
        config = without_quantization(config, tensors)
    if copies and origin.copied:
        problem = "tensors that the model does not use are copied from the folder that it was read from"
        with _source(problem, "leave them out by copies=False"):
            folder = Folder.open(origin.folder)
            tensors = [*tensors, *copied_tensors(folder, origin.copied, coded=coded, dtype=dtype)]
    write_pretrained(path, config, tensors, shard_bytes=shard_bytes)


@contextmanager
def _source(problem: str, remedy: str) -> Iterator[None]:
    """Turn errors of the folder that a model was read from into errors of `save_pretrained`."""
    try:
        yield
    except AutoshardError as error:
        raise AutoshardError(f"save_pretrained: {problem}, but {error}. Put the folder back, or {remedy}") from error


def _quantized(tensors: Sequence[Tensor], folder: Folder) -> list[Tensor]:
    """Return the tensors, with codes and scales in the place of those that the folder has quantized."""
    scheme, stored = folder.scheme, folder.stored_tensors()
    return [*tensors] if scheme is None else scheme.stored(scheme.unkept(tensors), stored)


def _decoded(tensors: Sequence[Tensor], config: Mapping[str, Any], dtype: str | None) -> list[Tensor]:
    """Return the tensors, with decoded ones in the place of codes and scales."""
    scheme = scheme_of(Config(config, CONFIG))
    if scheme is None:
        return [*tensors]
    plain = scheme.plain({one.name: one for one in scheme.unkept(tensors)})
    return [cast_tensor(one, dtype) for one in plain.values()]


def without_quantization(config: Mapping[str, Any], tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Return a `config.json` for tensors that are not quantized. Its dtype becomes that of most of them."""
    kinds = [one.dtype for one in tensors]
    name = "torch_dtype" if "torch_dtype" in config else "dtype"
    return {
        **{key: value for key, value in config.items() if key != QUANTIZATION},
        name: max(set(kinds), key=kinds.count),
    }


def tensors_of(
    sources: Mapping[str, Source], dtypes: Mapping[str, str], values: Callable[[str, tuple[int, ...]], np.ndarray]
) -> list[Tensor]:
    """Return the tensors of a model, read on demand.

    Args:
        sources: the tensors of each parameter, by its path.
        dtypes: the dtype in which each parameter is written.
        values: returns the values of a parameter at an index of its leading dimensions.

    Returns:
        The tensors, in the order of the parameters, so that those of one parameter follow each other.
    """
    parts: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for path, source in sources.items():
        for index, name in source.names.items():
            parts.setdefault(name, []).append((path, index))
    return [_tensor(name, pieces, sources, dtypes[pieces[0][0]], values) for name, pieces in parts.items()]


def write_pretrained(
    path: Any, config: Mapping[str, Any], tensors: Sequence[Tensor], *, shard_bytes: int = SHARD_BYTES,
    files: Mapping[str, bytes] | None = None,
) -> None:  # fmt: skip
    """Write a new folder of a pretrained model. It appears when it is complete.

    Args:
        path: a new or empty folder.
        config: the content of `config.json`.
        tensors: the tensors.
        shard_bytes: largest number of bytes of tensors in one file.
        files: other files, such as the tokenizer.

    Raises:
        AutoshardError: the folder is not empty.
    """
    folder = Path(path).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise AutoshardError(f"{str(folder)!r} exists already: use a new folder")
    draft = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        write(draft, tensors, shard_bytes=shard_bytes, metadata={"format": "pt"})
        (draft / CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n")
        for name, content in (files or {}).items():
            (draft / name).write_bytes(content)
        draft.replace(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _tensor(
    name: str,
    pieces: Sequence[tuple[str, tuple[int, ...]]],
    sources: Mapping[str, Source],
    dtype: str,
    values: Callable[[str, tuple[int, ...]], np.ndarray],
) -> Tensor:
    """Return a tensor that is made of parts of parameters, read on demand."""
    shape = sources[pieces[0][0]].tensor_shape

    def read() -> np.ndarray:
        tensor = np.empty(shape, dtype)
        for path, index in pieces:
            sources[path].layout.write(tensor, values(path, index).astype(dtype, copy=False))
        return tensor

    return Tensor(name, shape, dtype, read)


def gathered(x: jax.Array | np.ndarray, index: tuple[int, ...]) -> np.ndarray:
    """Return the values of a sharded array at an index of its leading dimensions, in the host's memory."""
    if not isinstance(x, jax.Array):
        return np.asarray(x)[index]
    found = np.empty(x.shape[len(index) :], x.dtype)
    for shard in x.addressable_shards:
        outer, inner = shard.index[: len(index)], shard.index[len(index) :]
        ranges = [i.indices(n)[:2] for i, n in zip(outer, x.shape, strict=False)]
        if all(start <= at < stop for at, (start, stop) in zip(index, ranges, strict=True)):
            place = tuple(at - start for at, (start, _) in zip(index, ranges, strict=True))
            found[inner] = np.asarray(shard.data)[place]
    return found
