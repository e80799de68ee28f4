"""Write the model of a run that started from a pretrained folder: as such a folder, or as an adapter."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from autoshard.ckpt.exchange.constants import SHARD_BYTES
from autoshard.ckpt.exchange.export import Exported, Model, cast_values
from autoshard.ckpt.exchange.safetensors import Tensor
from autoshard.errors import ConfigError
from autoshard.models.adapters.peft_files import adapter_sources, matrices_of, merged, write_adapter
from autoshard.models.adapters.rows import BASE, MAGNITUDES, A, B
from autoshard.models.pretrained.copied import copied_patterns, copied_tensors
from autoshard.models.pretrained.folder import CONFIG, Folder
from autoshard.models.pretrained.load import Described
from autoshard.models.pretrained.save import tensors_of, without_quantization, write_pretrained
from autoshard.train.config import run_directory
from autoshard.train.config.stored_config import from_dict
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.program.pretrained import describe, kept_files, sources_in


def pretrained_run(checkpoints: Path) -> TrainConfig | None:
    """Return the config of the run of a folder of checkpoints if it started from a pretrained folder, else None."""
    run_dir = checkpoints.parent
    if not (run_dir / run_directory.PRETRAINED).is_dir():
        return None
    return replace(from_dict(run_directory.read_config(run_dir), str(run_dir)), run_dir=run_dir)


def export_pretrained(
    config: TrainConfig,
    model: Model,
    out: Path,
    *,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    merge: bool = False,
) -> Exported:
    """Write the model of a step. One parameter is in memory at a time; that of stacked layers is one.

    Args:
        config: The run, with its folder.
        model: The step's model, with its saved dtypes.
        out: A new folder.
        dtype: Dtype of the tensors; by default the saved one.
        shard_bytes: Largest number of bytes of tensors in one file.
        merge: Whether to merge the adapters, and write a whole model.

    Raises:
        AutoshardError: The folder is not empty, there are no adapters to merge, or a value is out of the dtype's range.
    """
    if merge and not config.lora.rank:
        raise ConfigError("--merge is for runs with adapters, and this run has none: leave it out")
    if merge and (config.lora.quantize != "none" or config.pretrained.keep_codes):
        form = "codes of the folder" if config.pretrained.keep_codes else config.lora.quantize
        raise ConfigError(
            f"the frozen weights of this run are {form}, so a merged model would not have those of "
            f"the folder: export without --merge, then `autoshard ckpt merge {config.pretrained.folder} ADAPTER OUT`"
        )
    described = describe(config)
    saved = {one.name.replace(".", "/"): one for one in model.tensors}
    shapes = {path: one.shape for path, one in saved.items()}
    dtypes = {path: dtype or one.dtype for path, one in saved.items()}
    read = functools.lru_cache(1)(lambda path: saved[path].read())
    factor = functools.lru_cache(3)(lambda path: saved[path].read())

    def values(path: str, index: tuple[int, ...]) -> np.ndarray:
        found = read(path)[index]
        stem = path.removesuffix(BASE)
        if path.endswith(f"/{BASE}"):
            own = [factor(stem + name)[index] for name in (A, B, *([MAGNITUDES] if config.lora.dora else []))]
            found = merged(found, own[0], own[1], config.lora.scale, *own[2:])
        return cast_values(path, found, dtypes[path])

    if config.lora.rank and not merge:
        sources = adapter_sources(described.family, described.cfg, shapes)
        tensors = tensors_of(sources, dtypes, values)
        matrices = matrices_of(described.family, described.cfg)
        write_adapter(out, config.lora, tensors, matrices, str(config.pretrained.folder))
    else:
        tensors = tensors_of(sources_in(described, shapes), dtypes, values)
        content = without_quantization(described.origin.values(), tensors)
        tensors += _copies(config, described, dtype)
        write_pretrained(out, content, tensors, shard_bytes=shard_bytes, files=_files(config))
    return _record(out, tensors, model.averaged)


def _copies(config: TrainConfig, described: Described, dtype: str | None) -> list[Tensor]:
    """Return the tensors that the model does not use and the run keeps, decoded if they are quantized."""
    folder = Folder.open(config.model_folder)
    if not folder.has_tensors:
        return []
    tensors = folder.tensors()
    patterns = copied_patterns(described.family, folder, tensors)
    return copied_tensors(folder, patterns, coded=False, dtype=dtype)


def _files(config: TrainConfig) -> Mapping[str, bytes]:
    assert config.model_folder is not None
    return {file.name: file.read_bytes() for file in kept_files(config.model_folder) if file.name != CONFIG}


def _record(out: Path, tensors: list[Tensor], averaged: bool) -> Exported:
    names = tuple(sorted(file.name for file in out.iterdir()))
    return Exported(out, names, len(tensors), sum(one.nbytes for one in tensors), averaged)
